"""Trace a parameter's gradient back to the matrix products that compute it, through ops that only move, add
or select numbers."""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Generic, TypeAlias, TypeVar

import torch

from rematplan.runtime.graph.captured_step import Call, CapturedStep, Ref, substitute
from rematplan.runtime.statistics.products import BatchSplit, Product

aten = torch.ops.aten

Found = TypeVar("Found")
Chain: TypeAlias = tuple[tuple[Call, int], ...]
"""Calls from a product to the gradient, each with the position of its result."""

SAME = frozenset({aten.clone.default, aten._to_copy.default, aten.alias.default, aten.detach.default})
"""Ops that return their argument's numbers, perhaps rounded."""


@dataclass(frozen=True, slots=True)
class RowRange:
    """A part of a parameter: some rows of its first dimension. ``start``: the first row. ``size``: the number of
    rows."""

    start: int
    size: int


@dataclass(frozen=True, slots=True)
class Summand(Generic[Found]):
    """One summand of a parameter's gradient."""

    found: Found
    """What the function ``terminal`` of `summands` returned for the call that computes the summand."""
    chain: Chain
    """Views and sums between that call and the gradient. Copies, additions and calls of `REGIONS` are left out."""
    region: RowRange | None
    """The rows of the gradient to which the summand is added; None for all rows."""


class NoRow(Exception):
    """Raised for a gradient that is computed in a way for which no statistics are known. The text is the reason."""

    def __init__(self, why: str, at: str) -> None:
        super().__init__(why)
        #: The name of the value in whose computation the reason was found.
        self.at = at


def summands(
    step: CapturedStep, value: str, terminal: Callable[[Call, int], Found | None]
) -> list[Summand[Found]]:
    """Return the summands of a gradient in the order of their calls, found backwards through additions, copies, views,
    sums and `REGIONS`. ``terminal`` returns what describes a call's result (by position) as a summand, or None to
    follow it further. Raises `NoRow` if the gradient is computed in another way."""
    at = {call.name: position for position, call in enumerate(step.calls)}
    found: list[tuple[int, Summand[Found]]] = []
    open_: list[tuple[str, Chain, RowRange | None]] = [(value, (), None)]
    while open_:
        name, chain, region = open_.pop()
        call = step.call.get(step.values[name].call or "")
        if call is None:
            raise NoRow("its gradient is an input of the step", name)
        index = call.results.index(name)
        one = terminal(call, index)
        if one is not None:
            found.append((at[call.name], Summand(one, chain, region)))
        elif call.target in SAME:
            open_.append((call.args[0].value, chain, region))
        elif summands := _summands(call):
            open_ += [(one, chain, region) for one in summands]
        elif not chain and region is None and (parts := _regions(call, step)):
            open_ += [(one, (), part) for one, part in parts]
        elif call.target is aten.sum.dim_IntList or (call.is_view and isinstance(call.args[0], Ref)):
            open_.append((call.args[0].value, ((call, index), *chain), region))
        else:
            raise NoRow(f"its gradient comes from {_name(call)}, for which no statistics are known", name)
    found.sort(key=lambda one: one[0])
    return [term for _, term in found]


def _name(call: Call) -> str:
    return str(getattr(call.target, "overloadpacket", call.target))


def _summands(call: Call) -> list[str]:
    if call.target is not aten.add.Tensor or call.kwargs or len(call.args) != 2:
        return []
    return [ref.value for ref in call.args] if all(isinstance(a, Ref) for a in call.args) else []


def _cat(call: Call, step: CapturedStep) -> list[tuple[str, RowRange]]:
    """Return, for a concatenation of rows, each operand and its rows in the result; empty along another dimension."""
    parts, start = [], 0
    if len(call.args) > 1 and call.args[1] != 0:
        return []
    for ref in call.args[0]:
        size = step.values[ref.value].fake.shape[0]
        parts.append((ref.value, RowRange(start, size)))
        start += size
    return parts


def _stack(call: Call, _step: CapturedStep) -> list[tuple[str, RowRange]]:
    if len(call.args) > 1 and call.args[1] != 0:
        return []
    return [(ref.value, RowRange(at, 1)) for at, ref in enumerate(call.args[0])]


def _slice(call: Call, step: CapturedStep) -> list[tuple[str, RowRange]]:
    ref, _, dim, start, _, stride = call.args
    return (
        [(ref.value, RowRange(start, step.values[ref.value].fake.shape[0]))]
        if (dim, stride) == (0, 1)
        else []
    )


def _select(call: Call, _step: CapturedStep) -> list[tuple[str, RowRange]]:
    ref, _, dim, index = call.args
    return [(ref.value, RowRange(index, 1))] if dim == 0 else []


REGIONS: Mapping[Any, Callable[[Call, CapturedStep], list[tuple[str, RowRange]]]] = {
    aten.cat.default: _cat,
    aten.stack.default: _stack,
    aten.slice_backward.default: _slice,
    aten.select_backward.default: _select,
}
"""By op, for calls that assemble a gradient along its first dimension: the assembled gradients, each with its
range of rows."""


def _regions(call: Call, step: CapturedStep) -> list[tuple[str, RowRange]]:
    row = REGIONS.get(call.target)
    return row(call, step) if row else []


@dataclass(frozen=True, slots=True)
class Placement:
    """How a parameter, or a range of its rows, is viewed as the matrix that a product computes as its gradient."""

    split: tuple[int, ...]
    order: tuple[int, ...]
    groups: int
    """With ``split`` and ``order``: how the parameter becomes a matrix (`Factors.matrix`)."""
    d_out: int
    """The number of rows of the matrix."""
    batch: BatchSplit
    """How the leading dimension of a batched product is split."""


@dataclass(frozen=True, slots=True)
class _Part:
    """A dimension of a gradient, or a part of one, that is along one dimension of the product."""

    axis: int
    """The dimension of the product."""
    stride: int
    size: int
    """The number of entries; ``stride`` is the distance of two neighbours in the product's result, in elements."""
    summed: bool = False
    """Whether the gradient is the sum over this part."""


def mapped(product: Product, chain: Chain) -> Placement:
    """Return which dimensions of a gradient are rows, columns and groups of the product's matrix, after the views and
    sums of ``chain``. Raises `NoRow` if the gradient is not that matrix, reshaped, permuted, and perhaps summed over
    its batch dimension."""
    why = f"its gradient is not that of a matrix at {product.call.name}"
    try:
        result, summed = _replayed(product, chain)
    except (RuntimeError, IndexError) as error:
        raise NoRow(why, str(product.call.results[0])) from error
    strides = [math.prod(size for size, _ in product.axes[at + 1 :]) for at in range(len(product.axes))]
    axes = [(size, stride) for (size, _), stride in zip(product.axes, strides, strict=True)]
    left = _parts(result.shape, result.stride(), axes, summed=False)
    gone = _parts([n for n, _ in summed], [s for _, s in summed], axes, summed=True)
    if left is None or gone is None:
        raise NoRow(why, str(product.call.results[0]))
    for axis, (size, role) in enumerate(product.axes):
        # Of a product (4, 6) viewed as (2, 2, 6), dimension 0 is tiled by parts of strides 12 and 6: 12 = 6 · 2.
        own = sorted((p for p in (*left, *gone) if p.axis == axis), key=lambda p: -p.stride)
        tiled = all(one.stride == below.stride * below.size for one, below in itertools.pairwise(own))
        if (
            not tiled
            or math.prod(p.size for p in own) != size
            or (role != "batch" and any(p.summed for p in own))
        ):
            raise NoRow(why, str(product.call.results[0]))
    roles = {"batch": 0, "group": 0, "out": 1, "in": 2}
    order = sorted(range(len(left)), key=lambda at: (roles[product.axes[left[at].axis][1]], -left[at].stride))

    def size_of(*wanted: str) -> int:
        return math.prod(p.size for p in left if product.axes[p.axis][1] in wanted)

    batch = sorted((p for p in (*left, *gone) if product.axes[p.axis][1] == "batch"), key=lambda p: -p.stride)
    split = BatchSplit(tuple(p.size for p in batch), tuple(at for at, p in enumerate(batch) if not p.summed))
    if not batch and product.axes[0][1] == "batch":  # of size 1
        split = BatchSplit((product.axes[0][0],))
    return Placement(
        tuple(p.size for p in left), tuple(order), size_of("batch", "group"), size_of("out"), split
    )


def _replayed(product: Product, chain: Chain) -> tuple[torch.Tensor, list[tuple[int, int]]]:
    """Apply ``chain`` to a meta tensor shaped like the product, but take the first entry in place of each sum, which
    keeps the other strides. Return the result, and the size and stride of each dimension summed over."""
    shape = _made_shape(product)
    tensor, summed = torch.empty(shape, device="meta"), list[tuple[int, int]]()
    for call, index in chain:
        if call.target is aten.sum.dim_IntList:
            dims = sorted((d % tensor.dim() for d in call.args[1]), reverse=True)
            keep = len(call.args) > 2 and bool(call.args[2])
            for dim in dims:
                summed.append((tensor.shape[dim], tensor.stride(dim)))
                # The first entry instead of the sum: the strides of the other dimensions stay.
                tensor = tensor.narrow(dim, 0, 1) if keep else tensor.select(dim, 0)
        elif call.target is aten._unsafe_view.default:
            tensor = tensor.view(call.args[1])
        else:
            rest = substitute(call.args[1:], lambda _: None)
            made = call.target(tensor, *rest, **call.kwargs)
            tensor = made if call.single else made[index]
    return tensor, summed


def _made_shape(product: Product) -> tuple[int, ...]:
    """Return the shape of the tensor that the call of ``product`` computes."""
    sizes = [size for size, _ in product.axes]
    if product.axes[0][1] == "group":  # a convolution's first two dimensions are one
        sizes[:2] = [sizes[0] * sizes[1]]
    return tuple(sizes)


def _parts(shape: Any, strides: Any, axes: list[tuple[int, int]], summed: bool) -> list[_Part] | None:
    """Divide dimensions of a gradient into parts, each along one dimension of the product; None if some dimension
    cannot be divided so. Parts of size 1 are left out. ``axes``: size and stride of each dimension of the product's
    result."""
    # A dimension of size 48 and stride 1, of a product (8, 6), is 6 entries of its dimension 1 within 8 of dimension 0.
    found: list[_Part] = []
    for size, stride in zip(shape, strides, strict=True):
        own: list[_Part] = []
        while size > 1:
            axis = next((at for at, (n, s) in enumerate(axes) if n > 1 and s <= stride < s * n), None)
            if axis is None or stride % axes[axis][1]:
                return None
            n, s = axes[axis]
            room = s * n // stride
            if size <= room:
                own.append(_Part(axis, stride, size, summed))
                break
            if size % room or (s * n) % stride:
                return None
            own.append(_Part(axis, stride, room, summed))
            size, stride = size // room, stride * room
        found += reversed(own)
    return found
