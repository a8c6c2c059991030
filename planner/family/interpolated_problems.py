"""Compute planning problems at sizes between captured ones: bytes by polynomials of degree 2, checked at all
captured sizes.

Where dimensions are rounded the check fails. A workspace is the larger of the two nearest captured ones,
since kernels that work in blocks need it in steps.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from fractions import Fraction
from functools import cached_property

import numpy as np

from rematplan.ir import ProblemError, TrainingGraph
from rematplan.planner.family.amounts_by_position import Amounts, amounts_of
from rematplan.planner.family.tensor_positions import TensorPositions, tensor_positions, with_amounts

DEGREE = 2
CHECKS = 2
"""The least number of captured sizes at which the polynomials are checked, in addition to the three that determine
them."""


@dataclass(frozen=True, eq=False)
class Between:
    """Problems at all sizes from the smallest captured to the largest, interpolated."""

    captured: Mapping[int, TrainingGraph]
    """By size, ascending, with the same ops and tensors."""

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
        order of ``graph.tensors``; `ProblemError` if one is no whole number."""
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
        """Return bytes, workspaces and costs as in `problem`, but workspaces at captured sizes may be larger.

        ``size``: above the smallest captured, at most the largest.
        """
        return self._amounts(size, self.bytes_at(size))

    def _amounts(self, size: int, here: list[int]) -> Amounts:
        below, above = self._neighbours(size)
        low, high = self._known[below], self._known[above]
        costs = low.costs + (size - below) / (above - below) * (high.costs - low.costs)
        return self._positions.amounts(np.array(here, dtype=np.int64), low, high, costs)

    def problem(self, size: int) -> TrainingGraph:
        """Return the problem at a size from the smallest captured to the largest, the captured one if there
        is one.
        """
        if size in self.captured:
            return self.captured[size]
        here = self.bytes_at(size)
        return with_amounts(self.captured[self._neighbours(size)[0]], here, self._amounts(size, here))

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
    """Return a `Between` of captured problems by size; None if there are fewer than five, they differ, or
    bytes are no polynomials.
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
