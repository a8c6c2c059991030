"""A lower bound of the peak from the last heavy run before some tensors are all resident.

After the last run of an op of at least h bytes, no heavy op runs until the set is complete. What it is
computed from through heavy ops is resident during that run: at least a minimum cut between them. So a peak is
at least the least, over heavy v, of need(v) + the cut without what v reads and writes.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from rematplan.planner.bounds.max_flow import least_cut
from rematplan.planner.least.demands import Demands

NEARLY = 0.98
"""Thresholds h that differ by less than this factor are not both tried."""


class LastHeavyRun:
    """Bounds the peak at the last run of a heavy op: its bytes plus a minimum cut of what must then be resident.

    In the networks, node 0 is the source and 1 the sink; then come ops, then tensors.
    """

    def __init__(self, demands: Demands) -> None:
        """Lay the arcs: from the source to tensors, from these to their ops (capacity: bytes), from ops to what they
        read (unlimited) and to the sink."""
        self.demands, self.flows = demands, 0
        ops, tensors = len(demands.ops), len(demands.sizes)
        self.unlimited = sum(demands.sizes) + 1
        maker = demands.tables.maker
        read = [(v, t) for v, row in enumerate(demands.reads) for t in row]
        made = 2 + ops + np.arange(tensors)
        self.tails = np.concatenate(
            [made, np.zeros(tensors, int), [2 + v for v, _ in read], 2 + np.arange(ops)]
        ).astype(np.int32)
        self.heads = np.concatenate(
            [2 + maker, made, [2 + ops + t for _, t in read], np.ones(ops, int)]
        ).astype(np.int32)
        self.capacity = np.zeros(len(self.tails), np.int64)
        self.capacity[:tensors] = demands.sizes
        self.capacity[2 * tensors : 2 * tensors + len(read)] = self.unlimited
        self.first_op = 2 * tensors + len(read)
        pairs = zip(demands.ops, demands.reads, demands.writes, strict=True)
        self.work = [sum(demands.sizes[t] for t in {*r, *w}) + op.workspace for op, r, w in pairs]

    def bound(self, goal: Sequence[int], known: int, most: int) -> int:
        """Return a lower bound, at least ``known``, of the peak of a schedule, without inputs, in which all tensors
        ``goal`` are resident at once. ``most``: how many maximum flows may be computed."""
        until, threshold = self.flows + most, float("inf")
        ops = self._needed(goal)
        for work in sorted({self.work[v] for v in ops}, reverse=True):
            if work == 0 or work > NEARLY * threshold:
                continue
            threshold = work
            heavy = [v for v in ops if self.work[v] >= work]
            known = max(known, self._with(goal, heavy, known, work, until))
            if self.flows >= until:
                break
        return known

    def _with(self, goal: Sequence[int], heavy: list[int], known: int, work: int, until: int) -> int:
        """Return the bound that the ops ``heavy``, each of at least ``work`` bytes, prove for ``goal``; 0 if it is not
        above ``known``, or ``flows`` reaches ``until`` first."""
        if self._cut(goal, heavy, ()) + work <= known:
            return 0
        least = None
        for v in sorted(heavy, key=lambda v: self.work[v]):
            if least is not None and self.work[v] >= least:
                break
            if self.flows >= until:
                return 0
            own = {*self.demands.reads[v], *self.demands.writes[v]}
            peak = self.work[v] + self._cut(goal, heavy, sorted(own))
            least = peak if least is None else min(least, peak)
            if least <= known:
                return 0
        return least or 0

    def _cut(self, goal: Sequence[int], heavy: Sequence[int], free: Sequence[int]) -> int:
        self.flows += 1
        capacity = self.capacity.copy()
        capacity[len(self.demands.sizes) + np.array(goal, int)] = self.unlimited
        capacity[self.first_op + np.array(heavy, int)] = self.unlimited
        capacity[list(free)] = 0
        return least_cut(self.tails, self.heads, capacity)

    def _needed(self, goal: Sequence[int]) -> list[int]:
        """Return the ops by which the tensors ``goal`` are computed, directly or through others, ascending."""
        maker, seen = self.demands.tables.maker, set()
        wait = [int(maker[t]) for t in goal]
        while wait:
            v = wait.pop()
            if v not in seen:
                seen.add(v)
                wait += [int(maker[t]) for t in self.demands.reads[v]]
        return sorted(seen)
