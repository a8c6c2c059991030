"""Plans that may invert, and are never worse than those that may not.

A step that is opened for inverses is another problem than the step as it stands: halves are storages of their own, and
what is written in place is a concatenation. So both are planned, the plain one first, in a part of the time, and with
all that `planner.caches.plan_cache` keeps of earlier searches for it; what is found starts the other search;
and the better plan of the two is the plan.
"""

from __future__ import annotations

import time
from dataclasses import replace

from rematplan.ir import InfeasibleBudget, TrainingGraph
from rematplan.planner.auto.compile_kernels import compile_kernels
from rematplan.planner.auto.strategy import Auto
from rematplan.planner.caches.warm_starts import begin_with, transfer_plan
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
) -> tuple[TrainingGraph, Plan]:
    """The better of `auto`'s plans of two problems of one step, and its problem; of equal ones the plain one, all of
    whose results are equal bit by bit. ``plain`` is what a share as the budget is of.

    Raises:
        InfeasibleBudget: neither has a plan that fits; carries the smallest peak of the two.
    """
    compile_kernels(progress)  # before the clock starts
    least = budget.kind == "min"
    amount = 0 if least else budget.of(plain)
    began = time.monotonic()
    found: list[tuple[TrainingGraph, Plan]] = []
    failed: list[InfeasibleBudget] = []
    for graph, share in ((plain, PLAIN), (inverted, 1.0)):
        carried = [p for _, one in found if (p := transfer_plan(one, graph))]
        begin_with(graph, carried)
        left = max(0.0, auto.time_limit - (time.monotonic() - began))
        part = replace(auto, time_limit=share * left)
        try:
            if least:
                plan = least_plan(part, graph, progress, starts=carried)
            else:
                plan = plan_within(part, graph, amount, progress)
        except InfeasibleBudget as error:
            failed.append(error)
            continue
        found.append((graph, plan))
        if not least and plan.estimate.overhead <= 0:
            break  # nothing is left to be saved
    if not found:
        smallest = min(error.smallest for error in failed)
        last = failed[-1]  # of the problem that has all plans that the other has
        raise InfeasibleBudget(last.strategy, last.budget, smallest, last.known, last.floor)
    return min(found, key=lambda one: (one[1].estimate.peak if least else 0, one[1].estimate.cost))
