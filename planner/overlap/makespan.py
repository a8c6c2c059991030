"""Predict how long a training step takes if its ops run on two lanes (CUDA streams or threads) of one device."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import accumulate, pairwise

from rematplan.planner.core.lane_schedule import MAIN, RECOVERY, Laned, Needs, Sharing


def makespan(plan: Laned, needs: Needs, sharing: Sharing) -> float:
    """Return the predicted time of a step on two lanes, in the unit of `Op.cost`. Lanes start ops as soon as
    ``needs`` allow.
    """
    return max((end for _, end in times_on_lanes(plan, needs, sharing)), default=0.0)


def times_on_lanes(plan: Laned, needs: Needs, sharing: Sharing) -> list[tuple[float, float]]:
    """Return each run's predicted begin and end in the unit of `Op.cost`; the last entry is the step's end, twice.
    While both lanes work, each runs at ``sharing.speed``. The times that ``sharing`` states for handovers and for the
    start are added."""
    graph, runs, where = plan.graph, plan.runs, plan.where
    cost = [
        [
            graph.op[runs[at]].cost + sharing.handover * waiting
            for at, waiting in zip(lane, _waits(n), strict=False)
        ]
        for lane, n in zip(where.lanes, needs, strict=True)
    ]
    ends = list(accumulate((graph.op[name].cost for name in runs[: where.fork]), initial=0.0))
    times = [*pairwise(ends), *[(0.0, 0.0)] * (len(runs) - where.fork)]
    now = ends[-1] + sharing.start
    done, begun = [0, 0], [now, now]
    left = [lane[0] if lane else 0.0 for lane in cost]
    # While both lanes run, each does ``speed`` of its work. For example costs of 4 and 2 at speed 0.5: both run until
    # 4, then the first one does the other 2 alone, until 6. At a speed of at least 0.5, the result is at most the sum
    # of all costs and handovers.
    while any(done[lane] < len(cost[lane]) for lane in (MAIN, RECOVERY)):
        running = [
            lane
            for lane in (MAIN, RECOVERY)
            if done[lane] < len(cost[lane]) and needs[lane][done[lane]] <= done[1 - lane]
        ]
        work = min(left[lane] for lane in running)
        now += work / (sharing.speed if len(running) > 1 else 1.0)
        begun = [begun[lane] if lane in running else now for lane in (MAIN, RECOVERY)]
        for lane in running:
            left[lane] -= work
            if left[lane] <= 0:
                times[where.lanes[lane][done[lane]]] = (begun[lane], now)
                done[lane] += 1
                begun[lane] = now
                left[lane] = cost[lane][done[lane]] if done[lane] < len(cost[lane]) else 0.0
    return [*times, (now, now)]


def _waits(needs: Sequence[int]) -> list[bool]:
    """Return, for each run of a lane, whether it waits for the other lane: its entry in ``needs`` is above
    the one before.
    """
    return [wanted > had for had, wanted in zip((0, *needs), needs, strict=False)]
