"""Plans of little memory at hand, for calls that must go on although no plan keeps their budget."""

from __future__ import annotations

import time
from collections.abc import Iterable

from rematplan.ir import InfeasibleBudget, TrainingGraph
from rematplan.planner.auto.block_starts import leanest_plans
from rematplan.planner.bounds.cut_bounds import min_peak_bound
from rematplan.planner.caches.warm_starts import transfer_plan
from rematplan.planner.core.plan import Plan
from rematplan.planner.core.strategy import Strategy
from rematplan.planner.strategies.store_all import no_recompute

SECONDS = 2.0
"""For block plans of little memory, where no plan is known."""


def leanest_plan(graph: TrainingGraph, known: Iterable[Plan] = ()) -> Plan:
    """The plan of the least peak, and of the least cost at it, of those known; of block plans, where none is.

    Args:
        known: plans of this problem, or of another of the same step.
    """
    found = [plan for one in known if (plan := transfer_plan(one, graph))]
    found = found or [*leanest_plans(graph, time.monotonic() + SECONDS)]
    return min((*found, no_recompute(graph)), key=lambda plan: (plan.estimate.peak, plan.estimate.cost))


def check_floor(strategy: Strategy, graph: TrainingGraph, budget: int) -> None:
    """Refuse a budget (bytes) that the inputs and the largest op's transients exceed, without a search.

    Raises:
        InfeasibleBudget: no plan fits; carries a block plan of little memory.
    """
    if min_peak_bound(graph).bytes > budget:
        plan = leanest_plan(graph)
        raise InfeasibleBudget(strategy.name, budget, plan.estimate.peak, "proven", plan=plan)
