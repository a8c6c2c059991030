"""The plan with the smallest known peak: errors name it, and calls may follow it if no plan fits the budget."""

from __future__ import annotations

from collections.abc import Iterable

from rematplan.ir import TrainingGraph
from rematplan.planner.annealing.cheap_plan import refusal
from rematplan.planner.auto.smallest_peak_search import find_smallest_peak
from rematplan.planner.bounds.cut_bounds import min_peak_bound
from rematplan.planner.caches.warm_starts import transfer_plan
from rematplan.planner.core.effort import Effort
from rematplan.planner.core.plan import Plan, by_peak
from rematplan.planner.core.strategy import Strategy
from rematplan.planner.strategies.store_all import no_recompute

SECONDS = 1.5
"""Seconds for block plans and for lowering their peak, if no plan is known. Training waits for it."""
CHEAP_SECONDS = 0.5
"""Seconds for finding the cheap plan that a refusal without a search names."""


def leanest_plan(graph: TrainingGraph, known: Iterable[Plan] = ()) -> Plan:
    """Return the plan with the smallest peak, the cheapest of equals, among known plans and the plan without
    recomputation. If no known plan can be converted to the problem, search for about `SECONDS`."""
    found = [plan for one in known if (plan := transfer_plan(one, graph))]
    found = found or [find_smallest_peak(graph, Effort(SECONDS))]
    return min((*found, no_recompute(graph)), key=by_peak)


def check_floor(
    strategy: Strategy, graph: TrainingGraph, budget: int, known: Iterable[Plan] = (), *, lean: bool = False
) -> None:
    """Raise `InfeasibleBudget`, without a search for a plan within the budget, if a lower bound proves that none
    fits. ``lean``: whether small peaks were searched for before, so that ``known`` has such plans."""
    if min_peak_bound(graph).bytes > budget:
        plan = min((leanest_plan(graph, known if lean else ()), *known), key=by_peak)
        effort = Effort(0.0 if lean else CHEAP_SECONDS)
        raise refusal(strategy.name, graph, budget, plan, effort, known="proven")
