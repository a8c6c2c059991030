"""Which dimensions of an op's operands and results belong together: the table `RULES`, one row an op.

An op can be split along an axis if each part of its results depends on that part of its operands only. A result
without the axis is the sum of the parts' results.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol, Self, TypeAlias

import torch

from rematplan.runtime.capture.loss_in_place import CrossEntropyBackward
from rematplan.runtime.graph.captured_step import Call, CapturedStep, Ref
from rematplan.runtime.split.axis_spans import AxisSpan, Shape, through_view, trimmed

ATEN = torch.ops.aten
Labels: TypeAlias = tuple[int | str | None, ...]
"""One label for each dimension of a tensor. Dimensions with equal labels belong together. None: of size 1, and
broadcast against a larger dimension."""


SUM, LOSS = "sum", "loss"
"""What a result without the axis is: the sum of the parts' results; or the loss of ``nll_loss``, which is computed from
the losses of all rows."""
State: TypeAlias = AxisSpan | str
"""What is known of a value: where it has the axis, or `SUM`, or `LOSS`."""


@dataclass(frozen=True)
class DimensionRule:
    """How the dimensions of one call's tensors belong together."""

    labels: Mapping[str, Labels]
    """By the name of each operand and result."""
    whole: frozenset[int | str] = frozenset()
    """Labels along which the op cannot be split."""
    without: str = ""
    """What a result without the axis is: `SUM` or `LOSS`; empty if the op cannot be split then."""
    shapes: Mapping[int, str] = field(default_factory=dict)
    """By its position, each argument that is the shape of a value, and the value."""


@dataclass(frozen=True)
class Shaped:
    """A call with the shapes of its tensors."""

    call: Call
    step: CapturedStep

    def shape(self, value: str) -> Shape:
        """Return the shape of an operand or result."""
        return tuple(int(n) for n in self.step.values[value].fake.shape)

    def operand(self, at: int) -> str:
        """Return the name of the tensor that is argument ``at``."""
        found: str = self.call.args[at].value
        return found

    def argument(self, at: int, default: Any = None) -> Any:
        """Return argument ``at``, or ``default`` if the call has fewer."""
        return self.call.args[at] if at < len(self.call.args) else default

    @property
    def operands(self) -> tuple[str, ...]:
        """The names of all operands, each once."""
        return tuple(dict.fromkeys(self.call.operands))

    @property
    def results(self) -> tuple[str, ...]:
        """The names of all results that are tensors."""
        return self.call.made


class RowSum(Protocol):
    """The target of a call that sums over rows of its last operand. One before it is a sum to which it adds in
    place."""

    def part(self, shape: Shape, span: AxisSpan, indices: int, count: int) -> Self | None:
        """Return the target for a part of ``count`` of the ``indices`` rows of an operand of a ``shape``; None if it
        cannot be split."""


Rule: TypeAlias = Callable[[Shaped], DimensionRule | None]
"""Returns how the dimensions of a call belong together; None if the call cannot be split at all."""


def _pointwise(one: Shaped, shapes: Mapping[int, str] | None = None) -> DimensionRule:
    """Dimensions are aligned from the right, as in broadcasting."""
    result = one.shape(one.results[0])
    labels: dict[str, Labels] = {r: tuple(range(len(result))) for r in one.results}
    for value in one.operands:
        own, lacks = one.shape(value), len(result) - len(one.shape(value))
        labels[value] = tuple(d + lacks if n == result[d + lacks] else None for d, n in enumerate(own))
    return DimensionRule(labels, shapes=shapes or {})


def _expand(one: Shaped) -> DimensionRule:
    return _pointwise(one, {1: one.results[0]})


def _along(at: int, shapes: Mapping[int, int] | None = None) -> Rule:
    """The op treats one dimension, argument ``at``, whole. ``shapes``: by argument that is a result's shape, the
    result's position."""

    def rule(one: Shaped) -> DimensionRule:
        rank = len(one.shape(one.results[0]))
        labels: Labels = tuple(range(rank))
        given = {position: one.results[k] for position, k in (shapes or {}).items()}
        whole = frozenset({one.argument(at, 0) % rank})
        return DimensionRule(dict.fromkeys((*one.operands, *one.results), labels), whole, shapes=given)

    return rule


def _permuted(order: Callable[[Shaped, int], Sequence[int]]) -> Rule:
    def rule(one: Shaped) -> DimensionRule:
        rank = len(one.shape(one.results[0]))
        moved: Labels = tuple(order(one, rank))
        return DimensionRule({one.operand(0): tuple(range(rank)), one.results[0]: moved})

    return rule


def _swapped(one: Shaped, rank: int) -> Sequence[int]:
    order, (a, b) = list(range(rank)), (one.call.args[1] % rank, one.call.args[2] % rank)
    order[a], order[b] = b, a
    return order


def _without_dimension(larger: str, smaller: str, rank: int, at: int) -> DimensionRule:
    """One of two tensors lacks dimension ``at`` of the other, along which the op cannot be split."""
    dim = at % rank
    kept: Labels = tuple(d for d in range(rank) if d != dim)
    return DimensionRule({larger: tuple(range(rank)), smaller: kept}, frozenset({dim}))


def _select(one: Shaped) -> DimensionRule:
    x = one.operand(0)
    return _without_dimension(x, one.results[0], len(one.shape(x)), one.call.args[1])


def _unsqueeze(one: Shaped) -> DimensionRule:
    y = one.results[0]
    return _without_dimension(y, one.operand(0), len(one.shape(y)), one.call.args[1])


def _squeeze(one: Shaped) -> DimensionRule | None:
    x, y = one.operand(0), one.results[0]
    if one.shape(x) == one.shape(y):
        return _pointwise(one)
    one_dim = isinstance(one.argument(1), int)
    return _without_dimension(x, y, len(one.shape(x)), one.call.args[1]) if one_dim else None


def _reduction(without: str) -> Rule:
    """A reduction over the dimensions in argument 1, all by default, which stay with size 1 if argument 2 is true."""

    def rule(one: Shaped) -> DimensionRule:
        x, y, dims = one.operand(0), one.results[0], one.argument(1)
        rank = len(one.shape(x))
        over = {d % rank for d in ([dims] if isinstance(dims, int) else dims or range(rank))}
        keeps = bool(one.argument(2, False))
        left: Labels = tuple(None if d in over else d for d in range(rank) if keeps or d not in over)
        whole = frozenset() if without else frozenset(over)
        return DimensionRule({x: tuple(range(rank)), y: left}, whole, without)

    return rule


def _product(text: str) -> Rule:
    """A product as `torch.einsum` writes it. With a bias, the first of three operands, it cannot be split along what
    it sums."""
    left, right = text.split("->")
    operands = left.split(",")
    summed = frozenset(left) - frozenset(right) - {","}

    def rule(one: Shaped) -> DimensionRule:
        result = one.shape(one.results[0])
        labels: dict[str, Labels] = {one.results[0]: tuple(right)}
        pairs = list(zip((r.value for r in one.call.args[: len(operands)]), operands, strict=True))
        for value, names in pairs:
            own = one.shape(value)
            if len(pairs) == 3 and value == pairs[0][0]:
                sizes, names = result[len(result) - len(own) :], names[len(names) - len(own) :]
                found: Labels = tuple(
                    c if n == m else None for c, n, m in zip(names, own, sizes, strict=True)
                )
            else:
                found = tuple(names)
            if labels.setdefault(value, found) != found:  # one tensor is both operands
                return DimensionRule({}, frozenset())
        # Each part would add the bias.
        biased = len(operands) == 3
        return DimensionRule(labels, summed if biased else frozenset(), "" if biased else SUM)

    return rule


def _embedding(one: Shaped) -> DimensionRule:
    weight, indices = one.operand(0), one.operand(1)
    rows: Labels = tuple(range(len(one.shape(indices))))
    labels = {weight: ("row", "feature"), indices: rows, one.results[0]: (*rows, "feature")}
    return DimensionRule(labels, frozenset({"row", "feature"}))


def _embedding_backward(one: Shaped) -> DimensionRule | None:
    gradient, indices = one.operand(0), one.operand(1)
    if one.argument(4):  # scaled by the frequency of each index in the whole batch
        return None
    rows: Labels = tuple(range(len(one.shape(indices))))
    labels = {gradient: (*rows, "feature"), indices: rows, one.results[0]: ("row", "feature")}
    return DimensionRule(labels, frozenset({"row", "feature"}), SUM)


def _normalised(shape_at: int, full: Sequence[int], without: str) -> Rule:
    """A norm over as many last dimensions as argument ``shape_at`` has. ``full``: the positions of operands with all
    dimensions."""

    def rule(one: Shaped) -> DimensionRule:
        first = one.results[0] if one.call.results[0] else one.operand(full[0])
        rank, last = len(one.shape(first)), len(one.call.args[shape_at])
        every = {one.operand(at) for at in full}
        labels: dict[str, Labels] = {}
        for value in (*one.operands, *one.results):
            own = one.shape(value)
            if value in every or value == first or len(own) == rank > last:
                labels[value] = tuple(
                    d if d < rank - last or value in every or value == first else None for d in range(rank)
                )
            else:
                labels[value] = tuple(range(rank - len(own), rank))
        return DimensionRule(labels, frozenset(range(rank - last, rank)), without)

    return rule


def _loss(one: Shaped) -> DimensionRule:
    """The mean or sum over rows of negative logarithms of probabilities. All results are computed from the rows'."""
    scores, targets = one.operand(0), one.operand(1)
    rows = _rows(one, targets)
    labels: dict[str, Labels] = {targets: rows, scores: _with_classes(rows)}
    if isinstance(one.call.args[2], Ref):
        labels[one.operand(2)] = ("class",)
    labels |= dict.fromkeys(one.results, ())
    return DimensionRule(labels, frozenset({"class"}), LOSS)


def _loss_backward(one: Shaped) -> DimensionRule:
    targets = one.operand(2)
    rows = _rows(one, targets)
    labels: dict[str, Labels] = {one.operand(0): rows if one.shape(one.operand(0)) else (), targets: rows}
    for value in (*one.operands, *one.results):
        if value not in labels:
            labels[value] = _with_classes(rows) if len(one.shape(value)) == len(rows) + 1 else ()
    if isinstance(one.call.args[3], Ref):
        labels[one.operand(3)] = ("class",)
    return DimensionRule(labels, frozenset({"class"}))


def _rows(one: Shaped, targets: str) -> Labels:
    return tuple(range(len(one.shape(targets))))


def _with_classes(rows: Labels) -> Labels:
    return (*rows[:1], "class", *rows[1:])


def _fixed_in_convolution(one: Shaped, weight: str, at: int) -> frozenset[int | str]:
    """Return the labels along which a convolution cannot be split: channels, and pixels unless it is pointwise."""
    stride, padding, dilation, transposed, output_padding = one.call.args[at : at + 5]
    kernel = one.shape(weight)[2:]
    per_pixel = (
        set(kernel) <= {1} and set(stride) <= {1} and {*padding, *output_padding} <= {0} and not transposed
    )
    pixels = () if per_pixel and set(dilation) <= {1} else range(1, len(kernel) + 1)
    return frozenset({"in", "out", *pixels})


def _convolution(one: Shaped) -> DimensionRule:
    x, weight, y = one.operand(0), one.operand(1), one.results[0]
    pixels: Labels = tuple(range(1, len(one.shape(x)) - 1))
    labels: dict[str, Labels] = {x: ("n", "in", *pixels), y: ("n", "out", *pixels)}
    labels |= {value: (None,) * len(one.shape(value)) for value in one.operands if value != x}
    return DimensionRule(labels, _fixed_in_convolution(one, weight, 3))


def _convolution_backward(one: Shaped) -> DimensionRule | None:
    gradient, x, weight = (one.operand(at) for at in range(3))
    if gradient == x:
        return None
    pixels: Labels = tuple(range(1, len(one.shape(x)) - 1))
    labels: dict[str, Labels] = {gradient: ("n", "out", *pixels), x: ("n", "in", *pixels)}
    labels |= {value: (None,) * len(one.shape(value)) for value in one.operands if value not in labels}
    for result, kind in zip(one.call.results, (labels[x], None, None), strict=True):
        if result:
            labels[result] = kind or (None,) * len(one.shape(result))
    return DimensionRule(labels, _fixed_in_convolution(one, weight, 4), SUM)


RULES: Mapping[Any, Rule] = {
    ATEN._to_copy: _pointwise,
    ATEN.clone: _pointwise,
    ATEN.expand: _expand,
    ATEN.t: _permuted(lambda one, rank: range(rank)[::-1]),
    ATEN.transpose: _permuted(_swapped),
    ATEN.permute: _permuted(lambda one, rank: [d % rank for d in one.call.args[1]]),
    ATEN.select: _select,
    ATEN.unsqueeze: _unsqueeze,
    ATEN.squeeze: _squeeze,
    ATEN.slice: _along(1),
    ATEN.split: _along(2),
    ATEN.split_with_sizes: _along(2),
    ATEN.cat: _along(1),
    ATEN.slice_backward: _along(2, {1: 0}),
    ATEN._softmax: _along(1),
    ATEN._log_softmax: _along(1),
    ATEN._softmax_backward_data: _along(2),
    ATEN._log_softmax_backward_data: _along(2),
    ATEN.sum: _reduction(SUM),
    ATEN.mean: _reduction(""),
    ATEN.amax: _reduction(""),
    ATEN.logsumexp: _reduction(""),
    ATEN.mm: _product("ik,kj->ij"),
    ATEN.bmm: _product("bik,bkj->bij"),
    ATEN.addmm: _product("ij,ik,kj->ij"),
    ATEN.baddbmm: _product("bij,bik,bkj->bij"),
    ATEN.embedding: _embedding,
    ATEN.embedding_dense_backward: _embedding_backward,
    ATEN.native_layer_norm: _normalised(1, (0,), ""),
    ATEN.native_layer_norm_backward: _normalised(2, (0, 1), SUM),
    ATEN.nll_loss_forward: _loss,
    ATEN.nll_loss2d_forward: _loss,
    ATEN.nll_loss_backward: _loss_backward,
    ATEN.nll_loss2d_backward: _loss_backward,
    ATEN.convolution: _convolution,
    ATEN.convolution_backward: _convolution_backward,
}
"""By op, how its dimensions belong together. Pointwise ops have no row: `_pointwise` is that of all. Views that merge
or divide dimensions have none either (`through_view`)."""

RESHAPES = frozenset({ATEN.view, ATEN._unsafe_view, ATEN.reshape})
"""Ops that keep the order of all numbers, and change the shape."""


def rule_of(step: CapturedStep, call: Call) -> DimensionRule | None:
    """Return how the dimensions of a call's tensors belong together; None if the call cannot be split."""
    one = Shaped(call, step)
    packet = getattr(call.target, "overloadpacket", None)
    if call.ordered or call.waits or not one.results or not one.operands:
        return None
    if isinstance(call.target, CrossEntropyBackward):
        return _loss_backward(one)
    if packet in RULES:
        return RULES[packet](one)
    pointwise = torch.Tag.pointwise in getattr(call.target, "tags", ())
    return _pointwise(one) if pointwise and getattr(call.target, "namespace", "") == "aten" else None


def states_of(
    step: CapturedStep, call: Call, known: Mapping[str, State], indices: int
) -> dict[str, State] | None:
    """Return the states of a call's operands and results if it is split along an axis, or None if it cannot be.

    An operand without a state is read whole. ``known``: states of values, at least one of the call's.
    """
    one = Shaped(call, step)
    have = {v: s for v in (*one.operands, *one.results) if isinstance(s := known.get(v), AxisSpan)}
    if not have:
        return None
    if hasattr(call.target, "part"):
        x = one.call.args[-1].value
        sums = have.keys() == {x} and call.target.part(one.shape(x), have[x], indices, indices)
        return {x: have[x], one.results[0]: SUM} if sums else None
    reshapes = getattr(call.target, "overloadpacket", None) in RESHAPES
    found = _reshaped(one, have, indices) if reshapes else _labelled(one, have)
    if found is None or any(found.get(v) != s for v, s in have.items()):
        return None
    return found


def _labelled(one: Shaped, have: Mapping[str, AxisSpan]) -> dict[str, State] | None:
    """Return the states of a call's values by the labels of its dimensions; None if it cannot be split along this
    axis."""
    rule = rule_of(one.step, one.call)
    value, span = next(iter(have.items()))
    if rule is None or value not in rule.labels:
        return None
    axis = rule.labels[value][span.first : span.last + 1]
    if None in axis or not rule.whole.isdisjoint(axis):
        return None
    found: dict[str, State] = {}
    for other in (*one.operands, *one.results):
        at = [d for d, label in enumerate(rule.labels[other]) if label in axis]
        if at:
            if tuple(rule.labels[other][at[0] : at[-1] + 1]) != axis:
                return None
            found[other] = trimmed(one.shape(other), AxisSpan(at[0], at[-1], span.inner))
        elif other in one.results:
            if not rule.without:
                return None
            found[other] = rule.without
    return found


def _reshaped(one: Shaped, have: Mapping[str, AxisSpan], indices: int) -> dict[str, State] | None:
    x, y = one.operand(0), one.results[0]
    a = have.get(x) or through_view(one.shape(y), one.shape(x), have[y], indices)
    b = a and through_view(one.shape(x), one.shape(y), a, indices)
    return {x: a, y: b} if a and b else None
