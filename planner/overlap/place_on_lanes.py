"""Put a plan on two lanes within a budget, and predict whether that saves time."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace

from rematplan.ir import TrainingGraph
from rematplan.planner.core.lane_memory import peak, widest
from rematplan.planner.core.lane_schedule import Laned, Lanes, Sharing, place, waits_of
from rematplan.planner.core.plan import Plan
from rematplan.planner.core.schedule import runs_of, with_frees
from rematplan.planner.core.simulator import simulate
from rematplan.planner.overlap.makespan import makespan

PAYS = 0.02
"""The share of a step's time that two lanes must be predicted to save before they are used."""
USUAL = Sharing()


def fastest_on_two_lanes(
    graph: TrainingGraph, plans: Iterable[Plan], budget: int, sharing: Sharing = USUAL
) -> Plan | None:
    """Put each plan on two lanes (CUDA streams or threads) that hold at most ``budget`` bytes, and return the plan
    with the shortest predicted time.

    None if no plan can be put on two lanes within the budget, or none rematerialises anything.
    """
    laned = [found for plan in plans if (found := on_two_lanes(graph, plan, budget, sharing))]
    return min(laned, key=lambda plan: plan.lanes.makespan if plan.lanes else 0.0, default=None)


def saved(plan: Plan, cost: float) -> float:
    """Return the share of a step's time that a plan's two lanes are predicted to save; 0 if it has one lane.
    ``cost``: the time of the same step on one lane."""
    return 1 - plan.lanes.makespan / cost if plan.lanes and cost else 0.0


def on_two_lanes(graph: TrainingGraph, plan: Plan, budget: int, sharing: Sharing = USUAL) -> Plan | None:
    """Return a plan with its runs divided into two lanes (CUDA streams or threads) that hold at most ``budget``
    bytes at any relative speed. They wait for each other as rarely as that allows.

    None if the plan rematerialises nothing after its first backward op, or if it exceeds the budget on one lane.

    ``sharing``: how the lanes share the device, for the predicted time.
    """
    runs = tuple(runs_of(plan.schedule))
    laned = Laned(graph, runs, place(graph, runs))
    if not laned.where.recovery:
        return None
    schedule = with_frees(graph, runs)
    estimate = simulate(graph, schedule)
    if estimate.peak > budget or (needs := widest(laned, budget)) is None:
        return None
    where = laned.where
    lanes = Lanes(
        where.fork,
        where.recovery,
        waits_of(where, needs),
        peak(laned, schedule, needs),
        makespan(laned, needs, sharing),
        sharing.speed,
    )
    return replace(plan, schedule=schedule, estimate=estimate, lanes=lanes)
