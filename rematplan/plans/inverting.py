"""Plans that may invert, and are never worse than those that may not.

A step that is opened for inverses is another problem than the step as it stands: halves are storages of their own, and
what is written in place is a concatenation. So both are planned, the plain one first, in a part of the time; what is
found starts the other search; and the better plan of the two is the plan.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import replace

from rematplan.ir import InfeasibleBudget, TrainingGraph
from rematplan.planner.auto.compile_kernels import compile_kernels
from rematplan.planner.auto.plain_first import Found, plain_first
from rematplan.planner.auto.strategy import Auto
from rematplan.planner.caches.plan_store import PlanStore
from rematplan.planner.core.plan import Plan
from rematplan.planner.core.strategy import Progress, silent
from rematplan.plans.budgets import Budget, least_plan, plan_within

PLAIN = 0.4
"""Share of the time for the problem without inverses."""


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
    """The better of `auto`'s plans of two problems of one step, and its problem. ``plain`` is what a share as the
    budget is of. ``store``, which gets each plan that is found, and ``hurried``: see
    `plan_within`.

    Raises:
        InfeasibleBudget: neither has a plan that fits; carries the smallest peak of the two.
    """
    compile_kernels(progress)  # before the clock starts
    amount = None if budget.kind == "min" else budget.of(plain)
    store = PlanStore() if store is None else store
    began = time.monotonic()
    nothing_to_save: list[Plan] = []
    failed: list[InfeasibleBudget] = []

    def search(graph: TrainingGraph, share: float, starts: Sequence[Plan]) -> Plan | None:
        if nothing_to_save:
            return None
        part = replace(auto, time_limit=share * max(0.0, auto.time_limit - (time.monotonic() - began)))
        if amount is None:
            plan = least_plan(part, graph, progress, starts=starts)
            store.put(graph, None, plan)
            return plan
        try:
            plan = plan_within(part, graph, amount, progress, store=store, starts=starts, hurried=hurried)
        except InfeasibleBudget as error:
            failed.append(error)
            return None
        if plan.estimate.overhead <= 0:
            nothing_to_save.append(plan)
        return plan

    found = plain_first((plain, inverted), PLAIN, search)
    if not found:
        last = failed[-1]  # of the problem that has all plans that the other has
        least = min(failed, key=lambda error: error.smallest)
        raise last.changed(smallest=least.smallest, plan=least.plan)
    return better_of(found, budget)


def better_of(found: Found, budget: Budget) -> tuple[TrainingGraph, Plan]:
    """The problem and plan of the least peak, if that is the budget, and of the least cost; of equal ones the plain
    one, which is first: all of its results are equal bit by bit."""
    least = budget.kind == "min"
    return min(found, key=lambda one: (one[1].estimate.peak if least else 0, one[1].estimate.cost))
