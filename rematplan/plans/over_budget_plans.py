"""Plans with a small peak, for calls that must go on although no plan fits the budget."""

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
"""Seconds for finding block plans, if no plan is known."""


def leanest_plan(graph: TrainingGraph, known: Iterable[Plan] = ()) -> Plan:
    """Return the plan with the smallest peak, and of these the one with the least cost.

    It is one of the known plans, a block plan if none is known, or the plan without recomputation.

    Args:
        graph: the problem.
        known: plans of this problem, or of another problem of the same step.
    """
    found = [plan for one in known if (plan := transfer_plan(one, graph))]
    found = found or [*leanest_plans(graph, time.monotonic() + SECONDS)]
    return min((*found, no_recompute(graph)), key=lambda plan: (plan.estimate.peak, plan.estimate.cost))


def check_floor(strategy: Strategy, graph: TrainingGraph, budget: int) -> None:
    """Check, without a search, that the budget can hold the inputs together with any single op.

    ``budget``: bytes. ``strategy``: its name is reported by the error.

    Raises:
        InfeasibleBudget: it cannot. The error has a block plan with a small peak.
    """
    if min_peak_bound(graph).bytes > budget:
        plan = leanest_plan(graph)
        raise InfeasibleBudget(strategy.name, budget, plan.estimate.peak, "proven", plan=plan)
