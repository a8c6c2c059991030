"""Peaks and costs of many schedules of one structure at once, for given sizes."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TypeAlias

import numpy as np
from numpy.typing import NDArray

from rematplan.planner.family.amounts_by_position import Amounts, Floats, Ints
from rematplan.planner.family.schedule_by_position import Member

Bools: TypeAlias = NDArray[np.bool_]


@dataclass(frozen=True, eq=False)
class Evaluation:
    """The peaks and costs of a family's members for one problem.

    ``peaks``: bytes, equal to those of `simulate`. ``costs``: equal to those of `simulate` up to rounding errors.
    ``allowed``: for each member, whether it respects the ops that may run only once.
    """

    peaks: Ints
    costs: Floats
    allowed: Bools

    def fitting(self, budget: int) -> list[int]:
        """The positions of the members within a budget (bytes), the cheapest first."""
        rows = np.flatnonzero(self.allowed & (self.peaks <= budget))
        return [int(m) for m in rows[np.lexsort((self.peaks[rows], self.costs[rows]))]]

    def nearest_over(self, budget: int) -> int | None:
        """The position of the allowed member whose peak is over a budget by the fewest bytes; None if all allowed ones
        fit."""
        rows = np.flatnonzero(self.allowed & (self.peaks > budget))
        return int(rows[np.lexsort((self.costs[rows], self.peaks[rows]))[0]]) if rows.size else None

    def front(self) -> list[int]:
        """The positions of the members that no other beats in cost and peak, by rising cost and falling peak."""
        rows = np.flatnonzero(self.allowed)
        rows = rows[np.lexsort((self.peaks[rows], self.costs[rows]))]
        peaks = self.peaks[rows]
        least = np.minimum.accumulate(peaks) if rows.size else peaks
        better = np.ones(rows.size, dtype=bool)
        better[1:] = peaks[1:] < least[:-1]
        return [int(m) for m in rows[better]]


@dataclass(frozen=True, eq=False)
class Stack:
    """The events of several members in one array, so that one cumulative sum evaluates all of them.

    With T tensors, event t makes tensor t resident and event T + t frees it. Each member begins with a row without a
    run, since its peak is at least the bytes of the inputs.
    """

    events: Ints
    events_before: Ints
    recipes: Ints
    starts: Ints
    counts: Floats

    def evaluate(self, amounts: Amounts) -> Evaluation:
        """Return the peaks and costs of all members. O(events), in 64-bit integers, hence exact."""
        change = np.concatenate((amounts.sizes, -amounts.sizes))
        resident = np.empty(self.events.size + 1, dtype=np.int64)
        resident[0] = 0
        np.cumsum(change[self.events], out=resident[1:])
        held = resident[self.events_before]
        held += np.append(amounts.workspaces, 0)[self.recipes]
        return Evaluation(
            peaks=np.maximum.reduceat(held, self.starts) + amounts.fixed,
            costs=self.counts @ amounts.costs,
            allowed=np.all(self.counts[:, amounts.once] <= 1, axis=1),
        )


def stack(members: Sequence[Member], tensors: int) -> Stack:
    """Join the events of members, of which there must be at least one, into a `Stack`.

    ``tensors``: how many tensors the ops of the structure write.
    """
    nothing = members[0].recipes
    ends = np.cumsum([0, *(m.events.size for m in members)])
    rows = np.cumsum([0, *(m.runs.size + 1 for m in members)])
    before = [np.concatenate(([at], m.events_before + at)) for at, m in zip(ends, members, strict=False)]
    return Stack(
        events=np.concatenate([np.where(m.events >= 0, m.events, tensors - 1 - m.events) for m in members]),
        events_before=np.concatenate(before),
        recipes=np.concatenate([np.concatenate(([nothing], m.runs)) for m in members]),
        starts=rows[:-1],
        counts=np.array([m.counts for m in members], dtype=np.float64),
    )
