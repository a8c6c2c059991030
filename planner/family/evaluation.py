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
    """The peaks and costs of all members (schedules) of a family for one problem, in the order of the family's
    members.

    ``peaks``: bytes, equal to those of `simulate`. ``costs``: equal to those of `simulate` up to rounding errors.
    ``allowed``: whether the member runs no op again that may run only once.
    """

    peaks: Ints
    costs: Floats
    allowed: Bools

    def fitting(self, budget: int) -> list[int]:
        """Return the positions of the members whose peak is within ``budget`` bytes, the cheapest first. Members
        that are not ``allowed`` are left out."""
        rows = np.flatnonzero(self.allowed & (self.peaks <= budget))
        return [int(m) for m in rows[np.lexsort((self.peaks[rows], self.costs[rows]))]]

    def nearest_over(self, budget: int) -> int | None:
        """Return the position of the member whose peak exceeds ``budget`` bytes by the least; None if all fit.
        Members that are not ``allowed`` are left out."""
        rows = np.flatnonzero(self.allowed & (self.peaks > budget))
        return int(rows[np.lexsort((self.costs[rows], self.peaks[rows]))[0]]) if rows.size else None

    def front(self) -> list[int]:
        """Return the positions of the members that no other one beats or equals in both cost and peak, by rising
        cost and falling peak. Members that are not ``allowed`` are left out."""
        rows = np.flatnonzero(self.allowed)
        rows = rows[np.lexsort((self.peaks[rows], self.costs[rows]))]
        peaks = self.peaks[rows]
        least = np.minimum.accumulate(peaks) if rows.size else peaks
        better = np.ones(rows.size, dtype=bool)
        better[1:] = peaks[1:] < least[:-1]
        return [int(m) for m in rows[better]]


@dataclass(frozen=True, eq=False)
class Stack:
    """The events of several members (schedules) in one array, so that one cumulative sum evaluates all of them.

    ``events``: with T tensors, t where tensor t becomes resident and T + t where it is freed, member after member.
    ``events_before``: for each run, the number of events up to and including what it allocates; each member begins
    with a row without a run, since its peak is at least the bytes of the inputs. ``recipes``: the op or inverse of
    each of these rows. ``starts``: each member's first row. ``counts``: for each member, how often each op and
    inverse runs.
    """

    events: Ints
    events_before: Ints
    recipes: Ints
    starts: Ints
    counts: Floats

    def evaluate(self, amounts: Amounts) -> Evaluation:
        """Return the peaks and costs of all members for a problem with these sizes, workspaces and costs. O(events);
        peaks are computed in 64-bit integers, hence exact."""
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
    """Join the events of members (at least one) into a `Stack`. ``tensors``: how many tensors the ops write in
    problems of this structure."""
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
