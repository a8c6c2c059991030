"""Put a plan on two lanes within a budget, and say whether that pays."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace

from rematplan.ir import TrainingGraph
from rematplan.planner.core.lane_memory import peak, widest
from rematplan.planner.core.lanes import Laned, Lanes, Sharing, place, waits_of
from rematplan.planner.core.plan import Plan
from rematplan.planner.core.schedule import runs_of, with_frees
from rematplan.planner.core.simulator import simulate
from rematplan.planner.overlap.makespan import makespan

PAYS = 0.02
"""The share of a step's time that two lanes must be predicted to save to be worth their while."""
USUAL = Sharing()


def fastest_on_two_lanes(
    graph: TrainingGraph, plans: Iterable[Plan], budget: int, sharing: Sharing = USUAL
) -> Plan | None:
    """Of these plans on two lanes the one that ends first; None if none can be put on two within the budget."""
    laned = [found for plan in plans if (found := on_two_lanes(graph, plan, budget, sharing))]
    return min(laned, key=lambda plan: plan.lanes.makespan if plan.lanes else 0.0, default=None)


def saved(plan: Plan, cost: float) -> float:
    """The share of a step's time, ``cost`` on one lane, that a plan's two lanes are predicted to save."""
    return 1 - plan.lanes.makespan / cost if plan.lanes and cost else 0.0


def on_two_lanes(graph: TrainingGraph, plan: Plan, budget: int, sharing: Sharing = USUAL) -> Plan | None:
    """The plan with lanes that hold at most ``budget`` bytes, whatever their speeds, and wait for each other as little
    as that allows; None if nothing comes back after the fork, or the plan itself is over the budget."""
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
