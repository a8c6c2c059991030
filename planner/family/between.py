"""Problems at sizes between captured ones, where the bytes of all tensors are known to be polynomials of the size.

Bytes of a tensor are a product of its dimensions; with one dimension that varies they are a polynomial of it, of degree
2 where it occurs twice (attention scores, images). A polynomial through three captured sizes is trusted only if it
gives the bytes of every tensor exactly at further captured sizes. Where dimensions are rounded (strides, paddings) it
does not, and such sizes have to be captured.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from fractions import Fraction
from functools import cached_property

from rematplan.ir import Op, ProblemError, TrainingGraph
from rematplan.planner.family.workspaces import traffic_of, workspaces_between, workspaces_of

DEGREE = 2
CHECKS = 2
"""The least number of captured sizes, in addition to those that determine the polynomials, at which these hold."""


@dataclass(frozen=True, eq=False)
class Between:
    """Problems at all sizes between the smallest and the largest captured one.

    ``captured``: problems of the same ops and tensors by size, in ascending order.
    """

    captured: Mapping[int, TrainingGraph]

    @cached_property
    def sizes(self) -> list[int]:
        """The captured sizes."""
        return list(self.captured)

    @cached_property
    def _points(self) -> list[int]:
        """The sizes through which the polynomials go."""
        last = len(self.sizes) - 1
        return [self.sizes[round(k * last / DEGREE)] for k in range(DEGREE + 1)]

    @cached_property
    def _rows(self) -> list[tuple[int, ...]]:
        """For each tensor, its bytes at these sizes."""
        return list(zip(*([t.bytes for t in self.captured[x].tensors] for x in self._points), strict=True))

    def bytes_at(self, size: int) -> list[int]:
        """Return the bytes of each tensor.

        Raises:
            ProblemError: a polynomial has no whole number of bytes there.
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
        """Whether the polynomials give the bytes of all tensors of a captured size."""
        try:
            return self.bytes_at(size) == [t.bytes for t in self.captured[size].tensors]
        except ProblemError:
            return False

    def problem(self, size: int) -> TrainingGraph:
        """Return the problem at a size in the range.

        Bytes are the polynomials'. Costs are linear between the nearest two captured sizes. So are workspaces, in the
        bytes that an op reads and writes, with a margin (`workspaces_between`).

        Raises:
            ProblemError: the size is outside of the range.
        """
        if size in self.captured:
            return self.captured[size]
        if not self.sizes[0] <= size <= self.sizes[-1]:
            raise ProblemError(f"size {size} is not between {self.sizes[0]} and {self.sizes[-1]}")
        at = bisect_left(self.sizes, size)
        below, above = self.sizes[at - 1], self.sizes[at]
        low, high = self.captured[below], self.captured[above]
        tensors = tuple(replace(t, bytes=b) for t, b in zip(low.tensors, self.bytes_at(size), strict=True))
        bare = replace(low, tensors=tensors, fixed_split={})
        workspaces = workspaces_between(workspaces_of(low), workspaces_of(high), traffic_of(bare))
        share = (size - below) / (above - below)
        count = len(low.ops)
        recipes = [
            replace(a, cost=a.cost + share * (b.cost - a.cost), workspace=int(w))
            for a, b, w in zip(_recipes(low), _recipes(high), workspaces, strict=True)
        ]
        return replace(bare, ops=tuple(recipes[:count]), inverses=tuple(recipes[count:]))


def between(captured: Mapping[int, TrainingGraph]) -> Between | None:
    """Return the problems between captured sizes; None where nothing is known of them.

    That is where too few sizes are captured, where their problems are not of the same ops, tensors and constraints, or
    where some tensor's bytes are no polynomial of the size.
    """
    found = Between(dict(sorted(captured.items())))
    alike = {(g.fingerprint, tuple(t.name for t in g.tensors)) for g in captured.values()}
    if len(captured) < DEGREE + 1 + CHECKS or len(alike) > 1:
        return None
    return found if all(map(found.holds_at, found.sizes)) else None


def _weight(points: Sequence[int], k: int, x: int) -> Fraction:
    """The k-th polynomial of Lagrange at x: 1 at the k-th point, 0 at the others."""
    weight = Fraction(1)
    for j, point in enumerate(points):
        if j != k:
            weight *= Fraction(x - point, points[k] - point)
    return weight


def _recipes(graph: TrainingGraph) -> tuple[Op, ...]:
    return (*graph.ops, *graph.inverses)
