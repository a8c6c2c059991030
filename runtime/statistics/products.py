"""The ATen calls that compute a weight's gradient as a product Σ g_r a_rᵀ of the rows of a layer's input and
of its output's gradient."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Literal, TypeAlias

import torch

from rematplan.runtime.graph.captured_step import Call, CapturedStep, Ref
from rematplan.runtime.statistics.reading import Patches, Reading, Rows

aten = torch.ops.aten

Role: TypeAlias = Literal["batch", "out", "in", "group"]


@dataclass(frozen=True, slots=True)
class Product:
    """A call that computes the gradient of a weight as a product of two operands: Σ g_r a_rᵀ over their rows."""

    call: Call
    """The call."""
    inputs: str
    """The name of the value with the rows a_r: the layer's input."""
    gradients: str
    """The name of the value with the rows g_r: the gradient of the layer's output."""
    weight: str | None
    """The name of the weight's value if it is an argument of the call, else None."""
    axes: tuple[tuple[int, Role], ...]
    """The result's dimensions in row-major order, as size and role. A dimension ``batch`` may belong to the
    weight, or later calls sum over it."""
    read: Callable[[BatchSplit, int, bool], tuple[Reading, Reading]]
    """How to read the rows of ``inputs`` and of ``gradients``, given the split of ``batch``, the number of samples, and
    whether samples vary fastest. The number of samples is 0 if each row is a sample. Samples vary fastest in inputs
    (time, batch, features)."""


@dataclass(frozen=True, slots=True)
class BatchSplit:
    """The leading dimension of a batched matrix product, split into dimensions of the weight and dimensions
    that the gradient sums over."""

    sizes: tuple[int, ...] = ()
    """The sizes of the dimensions."""
    groups: tuple[int, ...] = ()
    """The positions of those that are dimensions of the weight."""


Row: TypeAlias = Callable[[Call, CapturedStep], Product | None]


def product_of(call: Call, step: CapturedStep) -> Product | None:
    """Return a call of the backward half as a product that computes a weight's gradient, or None if it is none."""
    row = PRODUCTS.get(getattr(call.target, "overloadpacket", None))
    return row(call, step) if row else None


def _mm(call: Call, step: CapturedStep) -> Product | None:
    """Return a plain or batched matrix product as the gradient of a weight, or None if both operands come from the same
    half. The operand that the forward half computes is the layer's input."""
    left, right = call.args[:2]
    late = [_is_late(step, ref) for ref in (left, right)]
    if late[0] == late[1]:
        return None
    first, second = (step.values[ref.value].fake.shape for ref in (left, right))
    batch: tuple[tuple[int, Role], ...] = tuple((size, "batch") for size in first[:-2])
    roles: tuple[Role, Role] = ("out", "in") if late[0] else ("in", "out")
    axes = (*batch, (first[-2], roles[0]), (second[-1], roles[1]))
    rows = second[-2]

    def read(split: BatchSplit, samples: int, inside: bool) -> tuple[Reading, Reading]:
        one = _matrix_rows(split, rows, first[-2], False, samples, inside)
        other = _matrix_rows(split, rows, second[-1], True, samples, inside)
        return (other, one) if late[0] else (one, other)

    inputs, gradients = (right, left) if late[0] else (left, right)
    return Product(call, inputs.value, gradients.value, None, axes, read)


def _matrix_rows(
    split: BatchSplit, rows: int, features: int, rows_first: bool, samples: int, inside: bool
) -> Rows:
    """Return how to read rows from an operand of shape (*split, rows, features), or (*split, features, rows) if
    ``rows_first`` is false. ``samples``: the number of samples, 0 if each row is one. ``inside``: whether samples vary
    faster than their positions."""
    at = len(split.sizes)
    summed = tuple(dim for dim in range(at) if dim not in split.groups)
    lead = split.sizes[summed[0]] if summed else rows
    # The first summed dimension may count samples and positions together: 32 rows of 4 samples are 8
    # positions each.
    per_sample = lead // samples if samples and lead % samples == 0 and lead != samples else 1
    inner = [rows, features] if rows_first else [features, rows]
    shape, row_at, feature_at = [*split.sizes, *inner], at + (not rows_first), at + rows_first
    counted = summed[0] if summed else row_at
    others = [dim for dim in (*summed, row_at) if dim != counted]
    groups = list(split.groups)
    if per_sample > 1:
        pair = [lead // per_sample, per_sample]
        shape[counted : counted + 1] = pair[::-1] if inside else pair
        others, groups = ([dim + (dim > counted) for dim in dims] for dims in (others, groups))
        feature_at += feature_at > counted
        others.insert(0, counted if inside else counted + 1)
        counted += inside
    return Rows(tuple(shape), tuple(groups), (feature_at,), (counted,), tuple(others))


def _convolution(call: Call, step: CapturedStep) -> Product | None:
    """Return the product for the weight's gradient in a `convolution_backward`; None if the call's output mask leaves
    that gradient out."""
    gradient, x, weight, _, stride, padding, dilation, transposed, _, groups, mask = call.args
    if not mask[1]:
        return None
    g, a, w = (step.values[ref.value].fake for ref in (gradient, x, weight))
    n = w.dim() - 2
    kernel, positions = tuple(w.shape[2:]), tuple(g.shape[2:])
    stride, padding, dilation = (_each(given, n) for given in (stride, padding, dilation))
    lead, other = w.shape[0] // groups, w.shape[1]
    roles: tuple[Role, Role] = ("in", "out") if transposed else ("out", "in")
    sizes: list[tuple[int, Role]] = [(groups, "group"), (lead, roles[0]), (other, roles[1])]
    sizes += [(k, "in") for k in kernel]
    if transposed:
        before = tuple(d * (k - 1) - p for d, k, p in zip(dilation, kernel, padding, strict=True))
        reach = [(size - 1) * s + 1 for size, s in zip(a.shape[2:], stride, strict=True)]
        spread, step_ = stride, (1,) * n
    else:
        before, reach = padding, list(a.shape[2:])
        spread, step_ = (1,) * n, stride
    # Four positions of a kernel of 3 with stride 2 read 9 entries: 1 of padding, then 8, none after them.
    needed = [
        (o - 1) * s + d * (k - 1) + 1 for o, s, d, k in zip(positions, step_, dilation, kernel, strict=True)
    ]
    after = [need - size - first for need, size, first in zip(needed, reach, before, strict=True)]
    pads = tuple(zip(before, after, strict=True))

    def read(_: BatchSplit, samples: int, _inside: bool) -> tuple[Reading, Reading]:
        batch = g.shape[0]
        per = batch // samples if samples and batch % samples == 0 else 1
        windows = Patches(
            batch, a.shape[1], groups, kernel, step_, dilation, pads, spread, bool(transposed), positions, per
        )
        shape = (batch // per, per, groups, g.shape[1] // groups, *positions)
        return windows, Rows(shape, (2,), (3,), (0,), (1, *range(4, 4 + n)))

    return Product(call, x.value, gradient.value, weight.value, tuple(sizes), read)


def _each(given: Any, n: int) -> tuple[int, ...]:
    return tuple(given) * n if len(given) == 1 else tuple(given)


def _is_late(step: CapturedStep, ref: Ref) -> bool:
    return step.values[ref.value].call in step.after_loss or any(
        i.value == ref.value and i.kind == "tangent" for i in step.inputs
    )


PRODUCTS: Mapping[Any, Row] = {
    aten.mm: _mm,
    aten.bmm: _mm,
    aten.convolution_backward: _convolution,
}
"""By ATen op, the function that describes a call of it as a `Product`, or returns None."""

LAYERS: Mapping[Any, tuple[int, int]] = {
    aten.mm: (0, 1),
    aten.bmm: (0, 1),
    aten.addmm: (1, 2),
    aten.baddbmm: (1, 2),
    aten.convolution: (0, 1),
}
"""The ops of the forward half that multiply an input with a weight. For each op, the positions of these two among its
arguments."""


def matrix_size(product: Product) -> int:
    """Return the number of elements of the gradient that a product computes."""
    return math.prod(size for size, _ in product.axes)
