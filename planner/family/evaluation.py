"""Compute the peaks and costs of many schedules at once, for any sizes of the tensors. The schedules are of problems
with the same ops and tensors."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from rematplan.planner.family.amounts_by_position import Amounts, Bools, Floats, Ints
from rematplan.planner.family.schedule_by_position import Member


@dataclass(frozen=True, eq=False)
class Evaluation:
    """The peaks and costs of all schedules of a family for one problem, one entry for each schedule (*member*), in
    the family's order.

    ``peaks``: bytes, equal to those of `simulate`. ``costs``: equal to those of `simulate` up to rounding errors.
    ``allowed``: False for a schedule that repeats an op which may run only once in this problem.
    """

    peaks: Ints
    costs: Floats
    allowed: Bools

    def fitting(self, budget: int) -> list[int]:
        """Return the positions of the schedules whose peak is within ``budget`` bytes, the cheapest first. Schedules
        that are not ``allowed`` are left out."""
        rows = np.flatnonzero(self.allowed & (self.peaks <= budget))
        return [int(m) for m in rows[np.lexsort((self.peaks[rows], self.costs[rows]))]]

    def nearest_over(self, budget: int) -> int | None:
        """Return the position of the schedule whose peak exceeds ``budget`` bytes by the least; None if all fit.
        Schedules that are not ``allowed`` are left out."""
        rows = np.flatnonzero(self.allowed & (self.peaks > budget))
        return int(rows[np.lexsort((self.costs[rows], self.peaks[rows]))[0]]) if rows.size else None

    def front(self) -> list[int]:
        """Return the positions of the schedules on the Pareto front: no other schedule is as good or better in both
        cost and peak. Of schedules with equal cost and peak, only the first is returned. The positions are sorted by
        rising cost, which is also by falling peak. Schedules that are not ``allowed`` are left out."""
        rows = np.flatnonzero(self.allowed)
        rows = rows[np.lexsort((self.peaks[rows], self.costs[rows]))]
        peaks = self.peaks[rows]
        least = np.minimum.accumulate(peaks) if rows.size else peaks
        better = np.ones(rows.size, dtype=bool)
        better[1:] = peaks[1:] < least[:-1]
        return [int(m) for m in rows[better]]


@dataclass(frozen=True, eq=False)
class Stack:
    """Several schedules (*members* of a family) joined into arrays, so that one cumulative sum gives the peaks of all
    of them, for any sizes of the tensors.

    ``events``: where tensors become resident or are freed, one schedule after the other. With T tensors, the entry t
    means that tensor t becomes resident, T + t that it is freed. The other arrays have rows: for each schedule, one
    row for the moment before its first run, when only the inputs are resident, then one row for each run.
    ``events_before``: for each row, how many entries of ``events`` precede it, those of its own allocations included.
    ``recipes``: for each row, the position of the op or inverse that runs; the number of ops and inverses if none
    runs. ``starts``: the first row of each schedule. ``counts``: how often each op and inverse (column) runs in each
    schedule (row).
    """

    events: Ints
    events_before: Ints
    recipes: Ints
    starts: Ints
    counts: Floats

    def evaluate(self, amounts: Amounts) -> Evaluation:
        """Return the peaks and costs of all schedules for a problem with the sizes, workspaces and costs ``amounts``.

        The time is linear in the number of events. Peaks are exact, because they are computed in 64-bit integers.
        """
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
    """Join schedules (at least one) into a `Stack`, which evaluates all of them at once.

    ``tensors``: the number of tensors that ops write, which is the same in all problems of these schedules.
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
