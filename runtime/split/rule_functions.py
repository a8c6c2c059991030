"""The functions of the table of split rules: their form, and those for general ops. Each says how the dimensions of an
op's tensors belong together."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence, Set
from dataclasses import dataclass, field, replace
from typing import Any, TypeAlias

import torch

from rematplan.runtime.graph.captured_step import Call, CapturedStep
from rematplan.runtime.split.axis_spans import AxisSpan, Shape

ATEN = torch.ops.aten
HALF = frozenset({torch.float16, torch.bfloat16})
"""Types in which sums over parts would lose digits. They are added in float32; losses in them are not split."""
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
    """By the position of an argument, the value whose shape the argument states, or of whose first dimension it states
    the number of indices."""
    single: bool = False
    """Whether only a single dimension can be an axis, not several merged ones."""
    mean: Mean | None = None
    """How the parts of a mean are computed, which is of all parts' numbers."""


@dataclass(frozen=True)
class Mean:
    """A call that takes a mean over the axis, or is the backward of one: its parts sum, and are divided."""

    call: Call
    """The call that sums in place of taking the mean."""
    count: int
    """The number of all parts' numbers."""
    scales: bool = False
    """Whether the call's first operand is multiplied by 1 / ``count`` instead of dividing the results."""


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


Rule: TypeAlias = Callable[[Shaped], DimensionRule | None]
"""A function that returns how the dimensions of a call belong together; None if the call cannot be split at all."""


def pointwise(one: Shaped, shapes: Mapping[int, str] | None = None) -> DimensionRule:
    """Return the rule of an elementwise op: dimensions are aligned from the right, as in broadcasting. ``shapes``: by
    an argument's position, the value whose shape it states."""
    result = one.shape(one.results[0])
    labels = {v: aligned(one.shape(v), result) for v in (*one.operands, *one.results)}
    return DimensionRule(labels, shapes=shapes or {})


def aligned(own: Shape, other: Shape) -> Labels:
    """Return a tensor's labels if it is broadcast to the shape ``other``, whose dimensions are the labels."""
    lacks = len(other) - len(own)
    return tuple(d + lacks if d + lacks >= 0 and n == other[d + lacks] else None for d, n in enumerate(own))


def filled(one: Shaped) -> DimensionRule:
    """Return the rule of an op whose result has the shape in argument 1, to which the operand is broadcast if it can
    be."""
    return pointwise(one, {1: one.results[0]})


def _of_rank(one: Shaped, rank: int) -> Mapping[str, Labels]:
    """Return labels by which equal dimensions of all tensors of a rank belong together. Others are read whole, such as
    an empty tensor to which a cache is joined."""
    every = (*one.operands, *one.results)
    return {v: tuple(range(rank)) if len(one.shape(v)) == rank else () for v in every}


def repeated(one: Shaped) -> DimensionRule:
    """Return the rule of an op that repeats its operand; the dimensions for which argument 1 is not 1 are not split."""
    rank, own = len(one.shape(one.results[0])), len(one.shape(one.operand(0)))
    labels: dict[str, Labels] = {
        one.operand(0): tuple(range(rank - own, rank)),
        one.results[0]: tuple(range(rank)),
    }
    return DimensionRule(labels, frozenset(d for d, n in enumerate(one.call.args[1]) if n != 1))


def along(at: int, shape: int | None = None, default: int = 0) -> Rule:
    """Return the rule of an op that is not split along the dimensions in argument ``at``: ``default`` if the call has
    no such argument, all if it is None or empty. ``shape``: the argument that is the result's shape."""

    def rule(one: Shaped) -> DimensionRule:
        rank = len(one.shape(one.results[0]))
        given = {} if shape is None else {shape: one.results[0]}
        dims = one.argument(at, default)
        whole = frozenset(d % rank for d in ([dims] if isinstance(dims, int) else dims or range(rank)))
        return DimensionRule(_of_rank(one, rank), whole, shapes=given)

    return rule


def last(count: int, shape: int | None = None) -> Rule:
    """Return the rule of an op that is not split along its last ``count`` dimensions. ``shape``: the argument that is
    the result's shape."""

    def rule(one: Shaped) -> DimensionRule:
        rank = len(one.shape(one.results[0]))
        given = {} if shape is None else {shape: one.results[0]}
        return DimensionRule(_of_rank(one, rank), frozenset(range(rank - count, rank)), shapes=given)

    return rule


def permuted(order: Callable[[Shaped, int], Sequence[int]]) -> Rule:
    """Return the rule of an op whose result has the operand's dimensions in another order. ``order``: from the call and
    the rank to this order."""

    def rule(one: Shaped) -> DimensionRule:
        rank = len(one.shape(one.results[0]))
        moved: Labels = tuple(order(one, rank))
        return DimensionRule({one.operand(0): tuple(range(rank)), one.results[0]: moved})

    return rule


def swapped(one: Shaped, rank: int) -> Sequence[int]:
    """Return the order of dimensions if those in arguments 1 and 2 are swapped."""
    order, (a, b) = list(range(rank)), (one.call.args[1] % rank, one.call.args[2] % rank)
    order[a], order[b] = b, a
    return order


def _without_dimension(
    larger: Sequence[str], smaller: Sequence[str], rank: int, at: int, shapes: Mapping[int, str] | None = None
) -> DimensionRule:
    """Return the rule of an op that cannot be split along dimension ``at`` of the tensors ``larger``, which the tensors
    ``smaller`` lack. ``rank``: of the larger ones. ``shapes``: by an argument's position, the value whose shape it
    states."""
    dim = at % rank
    kept: Labels = tuple(d for d in range(rank) if d != dim)
    labels = {**dict.fromkeys(larger, tuple(range(rank))), **dict.fromkeys(smaller, kept)}
    return DimensionRule(labels, frozenset({dim}), shapes=shapes or {})


def selected(one: Shaped) -> DimensionRule:
    """Return the rule of an op that takes one index of a dimension, argument 1 (by default 0), or each of them. The
    results lack that dimension."""
    return _without_dimension(one.operands, one.results, len(one.shape(one.operand(0))), one.argument(1, 0))


def joined(at: int, shape: int | None = None) -> Rule:
    """Return the rule of an op whose result has a dimension, argument ``at``, that the operands lack. ``shape``: the
    argument with the result's shape."""

    def rule(one: Shaped) -> DimensionRule:
        y = one.results[0]
        given = {} if shape is None else {shape: y}
        return _without_dimension((y,), one.operands, len(one.shape(y)), one.argument(at, 0), given)

    return rule


def squeezed(one: Shaped) -> DimensionRule | None:
    """Return the rule of a squeeze: the result has the operand's shape, or lacks the dimension that is argument 1. None
    if that argument is no integer."""
    x, y = one.operand(0), one.results[0]
    if one.shape(x) == one.shape(y):
        return pointwise(one)
    one_dim = isinstance(one.argument(1), int)
    return _without_dimension((x,), (y,), len(one.shape(x)), one.call.args[1]) if one_dim else None


def gathered(one: Shaped) -> DimensionRule | None:
    """Return the rule of an op that moves numbers along one dimension, argument 1, as indices say. Other dimensions
    belong together if all tensors have the same size; None if ranks differ or are 0."""
    shapes = [one.shape(v) for v in (*one.operands, *one.results)]
    rank = len(shapes[0])
    if not rank or any(len(shape) != rank for shape in shapes):
        return None
    unequal = {d for d in range(rank) if len({shape[d] for shape in shapes}) > 1}
    labels: Labels = tuple(range(rank))
    whole = frozenset(unequal | {one.call.args[1] % rank})
    return DimensionRule(dict.fromkeys((*one.operands, *one.results), labels), whole)


def indexed(one: Shaped) -> DimensionRule | None:
    """Return the rule of an index in which one tensor takes the place of a dimension; None if several do, or if the
    operand is its own index."""
    x, given = one.operand(0), [at for at, i in enumerate(one.call.args[1]) if i is not None]
    if len(given) != 1:
        return None
    index, (at,) = one.call.args[1][given[0]].value, given
    rank, rows = len(one.shape(x)), tuple(f"row {d}" for d in range(len(one.shape(index))))
    labels: dict[str, Labels] = {x: tuple(range(rank)), index: rows}
    labels[one.results[0]] = (*range(at), *rows, *range(at + 1, rank))
    return DimensionRule(labels, frozenset({at})) if x != index else None


def reduction(without: str, dims_at: int = 1) -> Rule:
    """Return the rule of a reduction over the dimensions in argument ``dims_at``, by default all, which stay with size
    1 if the next argument is true. ``without``: what parts give of a result that lacks the axis (`SUM`); empty: the op
    is not split so."""

    def rule(one: Shaped) -> DimensionRule:
        x, dims = one.operand(0), one.argument(dims_at)
        rank = len(one.shape(x))
        over = {d % rank for d in ([dims] if isinstance(dims, int) else dims or range(rank))}
        keeps = bool(one.call.kwargs.get("keepdim", one.argument(dims_at + 1, False)))
        left: Labels = tuple(None if d in over else d for d in range(rank) if keeps or d not in over)
        whole = frozenset() if without else frozenset(over)
        return DimensionRule(
            {x: tuple(range(rank)), **dict.fromkeys(one.results, left)}, whole, without, mean=_mean(one, over)
        )

    return rule


def _mean(one: Shaped, over: Set[int]) -> Mean | None:
    """Return how the parts of a call of ``mean`` over the dimensions ``over`` are computed; None for a call of another
    op."""
    if getattr(one.call.target, "overloadpacket", None) is not ATEN.mean:
        return None
    shape, keeps = one.shape(one.operand(0)), bool(one.argument(2, False))
    args = (one.call.args[0], sorted(over), keeps)
    total = replace(one.call, target=ATEN.sum.dim_IntList, args=args)
    return Mean(total, math.prod(shape[d] for d in over))


def product(text: str) -> Rule:
    """Return the rule of a product as `torch.einsum` writes it. A product with a bias, the first of three operands,
    cannot be split along what it sums. A tensor that is both operands with unequal labels cannot be split at all."""
    left, right = text.split("->")
    operands = left.split(",")
    summed = frozenset(left) - frozenset(right) - {","}

    def rule(one: Shaped) -> DimensionRule:
        """Label dimensions by the letters of ``text``, except those along which a bias is broadcast. Without labels
        nothing is split: one tensor is both operands with unequal labels."""
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


def embedding(one: Shaped) -> DimensionRule:
    """Return the rule of an embedding, split along its indices: each has one row of the weight."""
    weight, indices = one.operand(0), one.operand(1)
    rows: Labels = tuple(range(len(one.shape(indices))))
    labels = {weight: ("row", "feature"), indices: rows, one.results[0]: (*rows, "feature")}
    return DimensionRule(labels, frozenset({"row", "feature"}))


def embedding_backward(one: Shaped) -> DimensionRule | None:
    """Return the rule of an embedding's backward, whose result is a sum over indices. None if each index is scaled by
    its frequency in the whole batch."""
    gradient, indices = one.operand(0), one.operand(1)
    if one.argument(4):  # scaled by the frequency of each index in the whole batch
        return None
    rows: Labels = tuple(range(len(one.shape(indices))))
    labels = {gradient: (*rows, "feature"), indices: rows, one.results[0]: ("row", "feature")}
    return DimensionRule(labels, frozenset({"row", "feature"}), SUM)


def normalised(shape_at: int, full: Sequence[int], without: str) -> Rule:
    """Return the rule of a norm over its last dimensions, as many as argument ``shape_at`` has. ``full``: the positions
    of operands with all dimensions. ``without``: what parts give of a result that lacks the axis (`SUM`); empty: the op
    is not split so."""

    def rule(one: Shaped) -> DimensionRule:
        """Label dimensions so that the last ones, over which the norm is taken, are not split. In operands that lack
        dimensions, the present ones count as the last."""
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


def attention(query: int) -> Rule:
    """Return the rule of a fused attention, split along the batch, or along heads if queries and keys have as many.
    ``query``: the position of the queries, before keys and values."""

    def rule(one: Shaped) -> DimensionRule:
        """Label dimensions so that queries and numbers are not split, nor heads if several of queries share one of
        keys."""
        q, k = one.shape(one.operand(query)), one.shape(one.operand(query + 1))
        scores, mask = (*q[:3], k[2]), one.call.kwargs.get("attn_mask")
        labels: dict[str, Labels] = {
            v: tuple(range(len(one.shape(v)))) for v in (*one.operands, *one.results)
        }
        if mask is not None:
            labels[mask.value] = aligned(one.shape(mask.value), scores)
        # Several heads of queries may share one of keys.
        # In memory, the results have queries before heads.
        return DimensionRule(labels, frozenset({2, 3} if q[1] == k[1] else {1, 2, 3}), single=True)

    return rule
