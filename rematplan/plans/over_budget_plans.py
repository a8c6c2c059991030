"""Plans with a small peak, for calls that must go on although no plan fits the budget."""

from __future__ import annotations

import time
from collections.abc import Iterable

from rematplan.ir import TrainingGraph
from rematplan.planner.annealing.cheap_plan import refusal
from rematplan.planner.annealing.search_budget import SearchBudget
from rematplan.planner.auto.block_starts import leanest_plans
from rematplan.planner.auto.smallest_peak_search import find_smallest_peak
from rematplan.planner.bounds.cut_bounds import min_peak_bound
from rematplan.planner.caches.warm_starts import transfer_plan
from rematplan.planner.core.plan import Plan, by_peak
from rematplan.planner.core.strategy import Strategy
from rematplan.planner.strategies.store_all import no_recompute

SECONDS = 1.5
"""Seconds for block plans and for lowering their peak, if no plan is known. Training waits for it."""
CHEAP_SECONDS = 0.5
"""Seconds for finding the cheap plan that a refusal without a search names."""


def leanest_plan(graph: TrainingGraph, known: Iterable[Plan] = ()) -> Plan:
    """Return the plan with the smallest peak, and of plans with equal peaks the cheapest.

    It is chosen among ``known`` and the plan without recomputation. If no known plan can be used, block plans are made
    and their peak is lowered, in about `SECONDS`.

    Args:
        graph: the problem.
        known: plans of this problem, or of another problem of the same step.
    """
    found = [plan for one in known if (plan := transfer_plan(one, graph))]
    found = found or _lean_plans(graph, time.monotonic() + SECONDS)
    return min((*found, no_recompute(graph)), key=by_peak)


def _lean_plans(graph: TrainingGraph, until: float) -> list[Plan]:
    """Return plans with a small peak, found until a time of the monotonic clock."""
    found = [*leanest_plans(graph, until)]
    if (left := until - time.monotonic()) > 0:
        found.append(find_smallest_peak(graph, SearchBudget(left), found))
    return found


def check_floor(strategy: Strategy, graph: TrainingGraph, budget: int) -> None:
    """Check, without a search for plans that fit, that a budget can hold the inputs together with any single op.

    Args:
        strategy: its name is stated in the error.
        graph: the problem.
        budget: bytes.

    Raises:
        InfeasibleBudget: a lower bound on the peak exceeds the budget. The error has a plan with a small peak, and
            the peak of a cheap one.
    """
    if min_peak_bound(graph).bytes > budget:
        plan = leanest_plan(graph)
        effort = SearchBudget(CHEAP_SECONDS)
        raise refusal(strategy.name, graph, budget, plan, effort, known="proven")
