"""The peaks and costs of many schedules of one structure at once, for any sizes."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from rematplan.planner.core.array_types import Flags, Floats, Ints
from rematplan.planner.family.amounts_by_position import Amounts
from rematplan.planner.family.schedule_by_position import Member


@dataclass(frozen=True, eq=False)
class Evaluation:
    """The peaks and costs of a family's schedules for one problem, in the family's order."""

    peaks: Ints
    """Bytes, equal to those of `simulate`."""
    costs: Floats
    """Equal to those of `simulate` up to rounding."""
    allowed: Flags
    """False if the schedule repeats an op that may run only once."""

    def fitting(self, budget: int) -> list[int]:
        """Return the positions of the schedules whose peak is within ``budget`` bytes, the cheapest first. Schedules
        that are not ``allowed`` are left out."""
        rows = np.flatnonzero(self.allowed & (self.peaks <= budget))
        return [int(m) for m in rows[np.lexsort((self.peaks[rows], self.costs[rows]))]]

    def nearest_over(self, budget: int) -> int | None:
        """Return the position of the allowed schedule that exceeds ``budget`` bytes by the least; None if all fit."""
        rows = np.flatnonzero(self.allowed & (self.peaks > budget))
        return int(rows[np.lexsort((self.costs[rows], self.peaks[rows]))[0]]) if rows.size else None

    def front(self) -> list[int]:
        """Return the positions of the allowed schedules on the Pareto front, by rising cost; of equal ones
        the first.
        """
        rows = np.flatnonzero(self.allowed)
        rows = rows[np.lexsort((self.peaks[rows], self.costs[rows]))]
        peaks = self.peaks[rows]
        least = np.minimum.accumulate(peaks) if rows.size else peaks
        better = np.ones(rows.size, dtype=bool)
        better[1:] = peaks[1:] < least[:-1]
        return [int(m) for m in rows[better]]


@dataclass(frozen=True, eq=False)
class Stack:
    """Several schedules as arrays: one cumulative sum gives the peaks of all for any sizes."""

    events: Ints
    """One schedule after the other, with T tensors: t if tensor t becomes resident, T + t if it is freed."""
    events_before: Ints
    """A row before each schedule's first run, then one per run: the events up to it, own allocations included."""
    recipes: Ints
    """By row: the op or inverse that runs; their number if none does."""
    starts: Ints
    """The first row of each schedule."""
    counts: Floats
    """How often each op and inverse (column) runs in each schedule (row)."""

    def evaluate(self, amounts: Amounts) -> Evaluation:
        """Return the exact peaks and the costs of all schedules for a problem, in time linear in the events."""
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
    """Join at least one schedule into a `Stack`. ``tensors``: the number of tensors that ops write."""
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
