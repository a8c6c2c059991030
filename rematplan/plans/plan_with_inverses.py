"""Plan a step with and without inverses that round, and use the better plan.

The problem without is planned first, for a part of the time; with inverses, the search starts from its plan.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from rematplan.ir import InfeasibleBudget, TrainingGraph
from rematplan.planner.auto.auto_strategy import Auto
from rematplan.planner.auto.compile_kernels import compile_kernels
from rematplan.planner.auto.search_variants import Found, search_variants
from rematplan.planner.caches.plan_store import PlanStore
from rematplan.planner.core.effort import Effort
from rematplan.planner.core.plan import Plan
from rematplan.planner.core.strategy import Progress, silent
from rematplan.plans.budget_searches import least_plan, plan_within
from rematplan.plans.budgets import Budget

PLAIN = 0.4
"""The share of the time limit for the problem without inverses that round."""


def plan_either(
    auto: Auto,
    plain: TrainingGraph,
    inverted: TrainingGraph,
    budget: Budget,
    progress: Progress = silent,
    *,
    store: PlanStore | None = None,
    hurried: bool = False,
) -> tuple[TrainingGraph, Plan]:
    """Plan a step as the problem ``plain`` and as ``inverted``, which has inverses that round in addition; as ``plain``
    alone if its plan within a budget in bytes recomputes nothing. Return the better plan's problem and plan;
    `InfeasibleBudget` if none is found. ``hurried``: whether a budget below a proven floor is refused without a
    search."""
    compile_kernels(progress)  # before the clock starts
    amount = None if budget.is_lean else budget.of(plain)
    store = PlanStore() if store is None else store
    effort = Effort(auto.time_limit)
    nothing_to_save: list[Plan] = []
    failed: list[InfeasibleBudget] = []

    def search(graph: TrainingGraph, share: float, starts: Sequence[Plan]) -> Plan | None:
        """Return a plan of ``graph`` from a ``share`` of the effort left. None if none fits, which ``failed`` records,
        or if an earlier plan within the budget recomputes nothing."""
        if nothing_to_save:
            return None
        part = replace(auto, time_limit=share * effort.left)
        if amount is None:
            return least_plan(part, graph, progress, kind=budget.kind, starts=starts, store=store)
        try:
            plan = plan_within(part, graph, amount, progress, store=store, starts=starts, hurried=hurried)
        except InfeasibleBudget as error:
            failed.append(replace(error))  # without the traceback, which holds the frames of the call
            return None
        if plan.estimate.overhead <= 0:
            nothing_to_save.append(plan)
        return plan

    found = search_variants((plain, inverted), PLAIN, search)
    if not found:
        last = failed[-1]  # every plan of the plain problem is one of this problem, too
        least = min(failed, key=lambda error: error.smallest)
        cheap = min((error.cheap for error in failed if error.cheap), default=0)
        raise replace(last, smallest=least.smallest, plan=least.plan, cheap=cheap)
    return better_of(found, budget)


def better_of(found: Found, budget: Budget) -> tuple[TrainingGraph, Plan]:
    """Return the problem with the cheapest plan among ``found``, the first of equals. The caller ensures that all fit.
    For ``min`` and ``least``, plans too far above the smallest peak are left out."""
    smallest = min(plan.estimate.peak for _, plan in found)
    within = [
        one
        for one in found
        if not budget.is_lean or one[1].estimate.peak <= budget.bytes(0, lambda: smallest)
    ]
    return min(within, key=lambda one: one[1].estimate.cost)
