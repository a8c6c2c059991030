"""Compute planning problems for batch sizes between those for which steps were captured.

The bytes of a tensor are a product of its dimensions. If one dimension of the model's inputs varies (*the size*), the
bytes are a polynomial of the size: of degree 1 in most tensors, of degree 2 in those that have the dimension twice
(attention scores, images). A polynomial through three captured sizes is used only if it gives the bytes of every tensor
exactly at further captured sizes. Where dimensions are rounded (strides, paddings) it does not, and then every size has
to be captured.

A workspace is the larger one of those at the two nearest captured sizes, because kernels that work in blocks need
workspaces that grow in steps: flash attention on a CPU needs four times as many bytes from 768 words on as below.
"""

from __future__ import annotations

import math
from bisect import bisect_left
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from fractions import Fraction
from functools import cached_property

import numpy as np

from rematplan.ir import ProblemError, TrainingGraph
from rematplan.planner.family.amounts_by_position import Amounts, amounts_of
from rematplan.planner.family.tensor_positions import TensorPositions, tensor_positions

DEGREE = 2
CHECKS = 2
"""The least number of captured sizes at which the polynomials are checked, in addition to the three that determine
them."""


@dataclass(frozen=True, eq=False)
class Between:
    """Planning problems at all sizes of one dimension of the model's inputs, from the smallest captured size to the
    largest, interpolated between problems captured at some sizes.

    ``captured``: the captured problems by size, in ascending order. All have the same ops and tensors, and the bytes
    of each tensor are a polynomial of the size.
    """

    captured: Mapping[int, TrainingGraph]

    @cached_property
    def sizes(self) -> list[int]:
        """The sizes of the varying dimension at which problems were captured, ascending."""
        return list(self.captured)

    @cached_property
    def _points(self) -> list[int]:
        """The three captured sizes from which the polynomials are computed: the smallest, one in the middle, and the
        largest."""
        last = len(self.sizes) - 1
        return [self.sizes[round(k * last / DEGREE)] for k in range(DEGREE + 1)]

    @cached_property
    def _rows(self) -> list[tuple[int, ...]]:
        """For each tensor, its bytes at the three captured sizes from which the polynomials are computed."""
        return list(zip(*([t.bytes for t in self.captured[x].tensors] for x in self._points), strict=True))

    def bytes_at(self, size: int) -> list[int]:
        """Return the bytes of each tensor at a size of the varying dimension, computed from the polynomials, in the
        order of ``graph.tensors``.
        """
        weights = [_weight(self._points, k, size) for k in range(DEGREE + 1)]
        values = {
            row: sum((w * b for w, b in zip(weights, row, strict=True)), Fraction())
            for row in set(self._rows)
        }
        if any(value.denominator > 1 or value < 0 for value in values.values()):
            raise ProblemError(f"at size {size} a tensor would not have a whole number of bytes")
        return [int(values[row]) for row in self._rows]

    def holds_at(self, size: int) -> bool:
        """Return whether the polynomials give exactly the captured bytes of all tensors at ``size``, one of the
        captured sizes."""
        try:
            return self.bytes_at(size) == [t.bytes for t in self.captured[size].tensors]
        except ProblemError:
            return False

    def amounts(self, size: int) -> Amounts:
        """Return the bytes, workspaces and costs of the problem at a size, without building the problem itself. They
        are computed as in `problem`, but at captured sizes as well, where workspaces may be larger.

        ``size``: above the smallest captured size, at most the largest.
        """
        below, above = self._neighbours(size)
        here = np.array(self.bytes_at(size), dtype=np.int64)
        at = self._positions
        a, b = self._known[below], self._known[above]
        costs = a.costs + (size - below) / (above - below) * (b.costs - a.costs)
        return Amounts(
            sizes=here[at.written],
            workspaces=np.maximum(a.workspaces, b.workspaces),
            costs=costs,
            fixed=int(here[at.inputs].sum()),
            base_cost=math.fsum(costs[: len(self.captured[below].ops)].tolist()),
            once=a.once,
        )

    def problem(self, size: int) -> TrainingGraph:
        """Return the problem at a size from the smallest captured one to the largest.

        At a captured size this is the captured problem. At other sizes, the bytes of tensors are computed from
        polynomials, and costs are interpolated linearly between the two nearest captured sizes. The workspace of an op
        is the larger one of its workspaces at these two sizes.
        """
        if size in self.captured:
            return self.captured[size]
        below, above = self._neighbours(size)
        low, high = self.captured[below], self.captured[above]
        tensors = tuple(replace(t, bytes=b) for t, b in zip(low.tensors, self.bytes_at(size), strict=True))
        bare = replace(low, tensors=tensors, fixed_split={})
        share = (size - below) / (above - below)
        count = len(low.ops)
        recipes = [
            replace(a, cost=a.cost + share * (b.cost - a.cost), workspace=max(a.workspace, b.workspace))
            for a, b in zip(low.recipes, high.recipes, strict=True)
        ]
        return replace(bare, ops=tuple(recipes[:count]), inverses=tuple(recipes[count:]))

    def _neighbours(self, size: int) -> tuple[int, int]:
        if not self.sizes[0] < size <= self.sizes[-1]:
            raise ProblemError(f"size {size} is not between {self.sizes[0]} and {self.sizes[-1]}")
        at = bisect_left(self.sizes, size)
        return self.sizes[at - 1], self.sizes[at]

    @cached_property
    def _known(self) -> dict[int, Amounts]:
        return {size: amounts_of(graph) for size, graph in self.captured.items()}

    @cached_property
    def _positions(self) -> TensorPositions:
        return tensor_positions(self.captured[self.sizes[0]])


def between(captured: Mapping[int, TrainingGraph]) -> Between | None:
    """Return a `Between`, which interpolates captured problems at the sizes between them. ``captured``: the problems
    by size of the varying dimension.

    The result is None if interpolation would not be reliable: if fewer than five sizes are captured, if the problems
    differ in ops, tensors or constraints, or if the bytes of some tensor at the captured sizes are not a polynomial
    of degree 2 or less.
    """
    found = Between(dict(sorted(captured.items())))
    alike = {(g.fingerprint, tuple(t.name for t in g.tensors)) for g in captured.values()}
    if len(captured) < DEGREE + 1 + CHECKS or len(alike) > 1:
        return None
    return found if all(map(found.holds_at, found.sizes)) else None


def _weight(points: Sequence[int], k: int, x: int) -> Fraction:
    """Return the value at ``x`` of the Lagrange polynomial that is 1 at ``points[k]`` and 0 at the other points."""
    weight = Fraction(1)
    for j, point in enumerate(points):
        if j != k:
            weight *= Fraction(x - point, points[k] - point)
    return weight
