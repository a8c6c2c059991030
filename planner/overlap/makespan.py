"""Predict how long a step takes on two lanes that share one device."""

from __future__ import annotations

from collections.abc import Sequence

from rematplan.planner.core.lane_schedule import MAIN, RECOVERY, Laned, Needs, Sharing


def makespan(plan: Laned, needs: Needs, sharing: Sharing) -> float:
    """Return the predicted time of a step on two lanes (CUDA streams or threads), in the unit of `Op.cost`.

    Runs before the first backward op are sequential; from there on each lane starts its next run as soon as
    ``needs`` allow. For a speed of at least 0.5, the result is at most the sum of all costs, of ``sharing.handover``
    for each wait, and of ``sharing.start``.

    Args:
        plan: the runs and their division into lanes.
        needs: for each run, how many runs of the other lane it waits for.
        sharing: how the lanes share the device.
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
    """Return, for each run of a lane, whether it waits for more than the run before it."""
    return [wanted > had for had, wanted in zip((0, *needs), needs, strict=False)]
