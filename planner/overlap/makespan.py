"""Predict how long a training step takes if its ops run on two lanes (CUDA streams or threads) of one device."""

from __future__ import annotations

from collections.abc import Sequence

from rematplan.planner.core.lane_schedule import MAIN, RECOVERY, Laned, Needs, Sharing


def makespan(plan: Laned, needs: Needs, sharing: Sharing) -> float:
    """Return the predicted time of a step on two lanes, in the unit of `Op.cost`. Lanes start ops as soon as
    ``needs`` allow.
    """
    graph, runs, where = plan.graph, plan.runs, plan.where
    cost = [
        [
            graph.op[runs[at]].cost + sharing.handover * waiting
            for at, waiting in zip(lane, _waits(n), strict=False)
        ]
        for lane, n in zip(where.lanes, needs, strict=True)
    ]
    now = sum(graph.op[name].cost for name in runs[: where.fork]) + sharing.start
    done = [0, 0]
    left = [lane[0] if lane else 0.0 for lane in cost]
    # At a speed of at least 0.5, the result is at most the sum of all costs and handovers.
    while any(done[lane] < len(cost[lane]) for lane in (MAIN, RECOVERY)):
        running = [
            lane
            for lane in (MAIN, RECOVERY)
            if done[lane] < len(cost[lane]) and needs[lane][done[lane]] <= done[1 - lane]
        ]
        work = min(left[lane] for lane in running)
        now += work / (sharing.speed if len(running) > 1 else 1.0)
        for lane in running:
            left[lane] -= work
            if left[lane] <= 0:
                done[lane] += 1
                left[lane] = cost[lane][done[lane]] if done[lane] < len(cost[lane]) else 0.0
    return now


def _waits(needs: Sequence[int]) -> list[bool]:
    """Return, for each run of a lane, whether it waits for the other lane: its entry in ``needs`` is above
    the one before.
    """
    return [wanted > had for had, wanted in zip((0, *needs), needs, strict=False)]
