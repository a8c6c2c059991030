"""Divide the ops of a plan into two lanes (CUDA streams or threads) within a budget, and predict the time that this
saves."""

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
"""Two lanes are used only if they are predicted to save at least this share of a step's time."""
USUAL = Sharing()


def fastest_on_two_lanes(
    graph: TrainingGraph, plans: Iterable[Plan], budget: int, sharing: Sharing
) -> Plan | None:
    """Divide each of the plans into two lanes, and return the one of the shortest predicted time; None if
    `on_two_lanes` divides none."""
    laned = [found for plan in plans if (found := on_two_lanes(graph, plan, budget, sharing))]
    return min(laned, key=lambda plan: plan.lanes.makespan if plan.lanes else 0.0, default=None)


def saved(plan: Plan, cost: float) -> float:
    """Return the share of a step's time ``cost`` that two lanes are predicted to save; negative if longer, 0
    with one lane.
    """
    return 1 - plan.lanes.makespan / cost if plan.lanes and cost else 0.0


def on_two_lanes(graph: TrainingGraph, plan: Plan, budget: int, sharing: Sharing = USUAL) -> Plan | None:
    """Return the plan, with earliest frees, on two lanes within ``budget`` bytes at any relative speed. None if no run
    is for the recovery lane (`place`), or the plan exceeds the budget even on one lane."""
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
