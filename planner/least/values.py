"""Values: for each tensor, a peak within which it can be computed from nothing, and a proven bound for each
op.

An op's value is the least level found for its reads, but at least its own need. Ops are valued in order.
"""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np

from rematplan.planner.core.array_types import Flags, Ints
from rematplan.planner.core.effort import Effort
from rematplan.planner.least.demands import NEVER, Demands
from rematplan.planner.least.group_descent import descend_by_groups, work_of
from rematplan.planner.least.regression import search

GATE = 0.9
"""Values up to this share of the largest working set are not improved: they limit no plan."""
DESCENTS = 0.15
"""The share of the effort that descents for single values may spend: in dense networks they gain little."""


@dataclass
class Values:
    """Searches, for each tensor, for a peak within which it can be computed from nothing (its value), and writes that
    to `Tables.value`."""

    demands: Demands
    effort: Effort
    """Each expanded state is charged to it."""
    value: Ints = field(init=False)
    """By op: the value of what it writes."""
    floor: Ints = field(init=False)
    """By op: a proven lower bound of the peak, without inputs, of any plan that runs it."""
    recipe: list[Ints] = field(init=False)
    """By op: the actions back in time from what it reads."""
    largest: int = 0
    """The largest working set of an op."""
    free: Flags = field(init=False)
    """No tensor is frozen."""
    for_descents: Effort = field(init=False)
    """The effort that descents for single values may spend."""

    def __post_init__(self) -> None:
        self.for_descents = self.effort.part(DESCENTS * self.effort.left)
        count = len(self.demands.ops)
        self.value, self.floor = np.zeros(count, np.int64), np.zeros(count, np.int64)
        self.recipe = [np.empty(0, np.int64) for _ in range(count)]
        self.free = np.zeros(len(self.demands.sizes), np.bool_)

    def run(self, limit: int, groups: int) -> None:
        """Find the values of all tensors. ``limit``: states to expand for one op. ``groups``: states to expand for each
        group of a descent that may follow."""
        work, maker = self.demands.work, self.demands.tables.maker
        self.largest = int(work.max(initial=0))
        for v, reads in enumerate(self.demands.reads):
            low = max([int(work[v]), *(int(self.floor[maker[t]]) for t in reads)])
            level, self.floor[v], actions = self._solve(v, low, limit, groups, deepest=False)
            self._set(v, max(level, int(work[v])), actions)

    @property
    def risen(self) -> list[int]:
        """The ops whose values are above those of all that they read."""
        rows = enumerate(self.demands.reads)
        return [v for v, _ in rows if self.value[v] > max([0, *self._read_values(v)])]

    def proven(self, known: int, limit: int) -> int:
        """Return a lower bound of the peak, without inputs, of any plan: ``known``, or what searches of ``limit``
        states prove, if that is more. Lower values that these searches find are recorded."""
        bound = max(known, int(self.floor.max(initial=0)))
        for v in self.risen:
            if self.value[v] <= bound or self.effort.over:
                continue
            reads = self.demands.large_of(self.demands.reads[v])
            level, low, looked, actions, _ = search(
                self.demands.tables, np.array(reads, np.int64), self.free, bound, -1, limit, False, -1
            )
            self.effort.charge(moves=work_of(int(looked)))
            bound = max(bound, int(low))
            if level < self.value[v]:
                self._set(v, max(int(level), int(self.demands.work[v])), actions)
        return bound

    def improve(self, aim: int, limit: int, deepest: bool) -> None:
        """Search once more for each op whose value exceeds ``aim``, its own working set and the values of what it
        reads; smaller values replace the known ones. Stop when the effort is spent. ``limit``: states to expand for one
        op. ``deepest``: of equal levels, whether the earliest state comes first instead of the smallest."""
        work = self.demands.work
        for v in np.flatnonzero(self.value > aim).tolist():
            if self.effort.over:
                return
            low = max(aim, int(work[v]))
            if self.value[v] <= max([low, *self._read_values(v)]):
                continue
            level, _, actions = self._solve(v, low, limit, limit, deepest)
            if level < self.value[v]:
                self._set(v, max(level, int(work[v])), actions)

    def _solve(self, v: int, low: int, limit: int, groups: int, deepest: bool) -> tuple[int, int, Ints]:
        """Return a level for the reads of op ``v`` (`NEVER` if none is found), a proven lower bound of it (at least
        ``low``), and the actions. ``limit``: states to expand, ``groups``: for one group. ``deepest``: of equal levels,
        whether the earliest state comes first instead of the smallest."""
        reads = self.demands.large_of(self.demands.reads[v])
        enough = max([low, *self._read_values(v)])
        start = np.array(reads, np.int64)
        level, bound, looked, actions, _ = search(
            self.demands.tables, start, self.free, low, -1, limit, deepest, enough
        )
        self.effort.charge(moves=work_of(int(looked)))
        if max(enough, GATE * self.largest) < level < NEVER and not self.for_descents.over:
            descent = descend_by_groups(self.demands.tables, reads, enough, groups, self.for_descents)
            if descent.level < level:
                level, actions = descent.level, np.array(descent.actions, np.int64)
        return int(level), max(low, min(int(bound), int(level))), actions

    def _read_values(self, v: int) -> list[int]:
        return [int(self.demands.tables.value[t]) for t in self.demands.large_of(self.demands.reads[v])]

    def _set(self, v: int, value: int, actions: Ints) -> None:
        self.value[v], self.recipe[v] = value, actions
        for t in self.demands.writes[v]:
            self.demands.tables.value[t] = NEVER if t in self.demands.after_once else value
