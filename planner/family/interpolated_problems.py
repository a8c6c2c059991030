"""Compute planning problems at sizes between captured ones: bytes by polynomials of degree 2 or less, checked at all
captured sizes.

The bytes of most tensors are a + b·x or a + b·x², where x is the size. Two sizes determine either, and a third one
checks it. Others need three sizes, and two more that check them. Where dimensions are rounded the check fails. A
workspace without such a polynomial is the larger of the two nearest captured ones, since kernels that work in blocks
need it in steps.
"""

from __future__ import annotations

import math
from bisect import bisect_left
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from fractions import Fraction
from functools import cached_property, lru_cache

import numpy as np

from rematplan.ir import ProblemError, TrainingGraph
from rematplan.planner.core.array_types import Floats, Ints
from rematplan.planner.family.amounts_by_position import Amounts, amounts_of
from rematplan.planner.family.tensor_positions import TensorPositions, tensor_positions, with_amounts

LAWS = ((1, 1), (2, 1), (1, 2))
"""Polynomials that are tried, simplest first: the power of the size, and the degree in this power."""
CHECKS = 2
"""A polynomial of degree d > 1 needs this many captured sizes in addition to the d + 1 that determine it; one of
degree 1 needs one."""


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
    def _rows(self) -> list[tuple[int, ...]]:
        """For each tensor, its bytes at the captured sizes."""
        return list(zip(*([t.bytes for t in graph.tensors] for graph in self.captured.values()), strict=True))

    @cached_property
    def _workspaces(self) -> list[tuple[int, ...]]:
        """For each op and inverse, its workspace at the captured sizes."""
        return list(zip(*(known.workspaces.tolist() for known in self._known.values()), strict=True))

    @cached_property
    def _laws(self) -> dict[tuple[int, ...], _Law | None]:
        """For bytes at the captured sizes, the simplest polynomial that gives all of them; None if there is none."""
        laws = [law for power, degree in LAWS if (law := _law(self.sizes, power, degree))]
        rows = {*self._rows, *self._workspaces}
        return {row: next((law for law in laws if law.holds(row)), None) for row in rows}

    @property
    def holds(self) -> bool:
        """Whether each tensor has a polynomial that gives its bytes at all captured sizes."""
        return all(self._laws[row] for row in self._rows)

    def bytes_at(self, size: int) -> list[int]:
        """Return the bytes of each tensor at a size of the varying dimension, computed from the polynomials, in the
        order of ``graph.tensors``; `ProblemError` if one is no whole number."""
        values = self._values(size)
        if any(values[row].denominator > 1 or values[row] < 0 for row in set(self._rows)):
            raise ProblemError(f"at size {size} a tensor would not have a whole number of bytes")
        return [int(values[row]) for row in self._rows]

    def _values(self, size: int) -> dict[tuple[int, ...], Fraction]:
        return {row: law.value(row, size) for row, law in self._laws.items() if law}

    def amounts(self, size: int) -> Amounts:
        """Return bytes, workspaces and costs at ``size``. At captured sizes, workspaces may be larger than the
        captured.

        ``size``: above the smallest captured, at most the largest; else `ProblemError`, as for a tensor without a whole
        number of bytes.
        """
        return self._amounts(size, self.bytes_at(size))

    def _amounts(self, size: int, here: list[int]) -> Amounts:
        """Return the amounts at ``size``, at which the tensors have the bytes ``here``, in the order of
        ``graph.tensors``. `ProblemError` unless ``size`` is above the smallest captured and at most the largest."""
        below, above = self._neighbours(size)
        low, high = self._known[below], self._known[above]
        values = self._values(size)
        workspaces = [
            min(larger, math.ceil(values.get(row, larger)))
            for row, larger in zip(
                self._workspaces, np.maximum(low.workspaces, high.workspaces).tolist(), strict=True
            )
        ]
        sizes = np.array(here, dtype=np.int64)
        costs = self._costs_at(self._positions.traffic(sizes), below, above)
        return self._positions.amounts(sizes, np.array(workspaces, dtype=np.int64), costs, low.once)

    def _costs_at(self, moved: Ints, below: int, above: int) -> Floats:
        """Return the cost of each op and inverse if it moves ``moved`` bytes, within its costs at the sizes ``below``
        and ``above``. Costs are on a parabola in these bytes, through the nearest other size too, or on a line if there
        is none."""
        others = [size for size in self.sizes if size not in (below, above)]
        third = min(others, key=lambda size: abs(size - below), default=above)
        (a, at_a), (b, at_b), (c, at_c) = (
            (self._traffic[size].astype(float), self._known[size].costs) for size in (below, above, third)
        )
        # Newton's divided differences. For example costs of 1, 4 and 16 for 1, 2 and 4 bytes: the slope is 3, the bend
        # 1, and 3 bytes cost 1 + 2 · 3 + 2 · 1 · 1 = 9 before clipping.
        with np.errstate(divide="ignore", invalid="ignore"):
            slope = (at_b - at_a) / (b - a)
            bend = ((at_c - at_a) / (c - a) - slope) / (c - b)
            line = np.where(a == b, np.maximum(at_a, at_b), at_a + (moved - a) * slope)
            costs = np.where(np.isfinite(bend), line + (moved - a) * (moved - b) * bend, line)
        return np.clip(costs, np.minimum(at_a, at_b), np.maximum(at_a, at_b))

    def problem(self, size: int) -> TrainingGraph:
        """Return the problem at ``size``, the captured one if there is one. `ProblemError` below the smallest or above
        the largest captured size, or if a tensor would not have a whole number of bytes."""
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
    def _traffic(self) -> dict[int, Ints]:
        """The bytes that each op and inverse moves at the captured sizes."""
        sizes = ((size, [t.bytes for t in graph.tensors]) for size, graph in self.captured.items())
        return {size: self._positions.traffic(np.array(own, dtype=np.int64)) for size, own in sizes}

    @cached_property
    def _positions(self) -> TensorPositions:
        return tensor_positions(self.captured[self.sizes[0]])


def between(captured: Mapping[int, TrainingGraph]) -> Between | None:
    """Return a `Between` of captured problems by size. None if their fingerprints or tensors differ, or a tensor's
    bytes are on no polynomial that further sizes check, as with too few problems."""
    found = Between(dict(sorted(captured.items())))
    alike = {(g.fingerprint, tuple(t.name for t in g.tensors)) for g in captured.values()}
    return found if len(alike) == 1 and found.holds else None


@dataclass(frozen=True)
class _Law:
    """A polynomial in a power of the size, through its values at some of the captured sizes."""

    sizes: tuple[int, ...]
    """All captured sizes."""
    power: int
    """The exponent of the size."""
    places: tuple[int, ...]
    """The positions in ``sizes`` of those that determine the polynomial."""

    def value(self, row: Sequence[int], size: int) -> Fraction:
        """Return the polynomial at a size. ``row``: the values at the captured sizes."""
        weights = _weights(tuple(self.sizes[at] ** self.power for at in self.places), size**self.power)
        return sum((w * row[at] for w, at in zip(weights, self.places, strict=True)), Fraction())

    def holds(self, row: Sequence[int]) -> bool:
        """Return whether the polynomial gives all values ``row`` at the captured sizes."""
        return all(self.value(row, size) == value for size, value in zip(self.sizes, row, strict=True))


def _law(sizes: Sequence[int], power: int, degree: int) -> _Law | None:
    """Return a law that the smallest size, the largest and those in the midst determine; None if too few sizes are left
    that check it."""
    last = len(sizes) - 1
    if last < degree + (CHECKS if degree > 1 else 1):
        return None
    return _Law(tuple(sizes), power, tuple(round(k * last / degree) for k in range(degree + 1)))


@lru_cache(1024)
def _weights(points: tuple[int, ...], x: int) -> list[Fraction]:
    """Return the values at ``x`` of the Lagrange polynomials, each of which is 1 at one of the points and 0 at the
    others."""
    return [math.prod((Fraction(x - q, p - q) for q in points if q != p), start=Fraction(1)) for p in points]
