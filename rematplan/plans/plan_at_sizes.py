"""Plan a step at new sizes. A compiled plan of other sizes is used if it is about as good."""

from __future__ import annotations

from collections.abc import Sequence

from rematplan.ir import InfeasibleBudget, ProblemError
from rematplan.planner.core.plan import Plan
from rematplan.planner.core.schedule import Schedule
from rematplan.planner.core.simulator import simulate
from rematplan.plans.first_plan import plan_at_once
from rematplan.plans.planner import Planner
from rematplan.runtime.graph.captured_step import CapturedStep

WORTH = 0.01
"""Another plan is compiled if its overhead is smaller by more than this share of the step's time."""
COMPILED = 8
"""Once this many plans are compiled, another one is compiled only if none of them fits."""


def plan_at_sizes(planner: Planner, step: CapturedStep, compiled: Sequence[Schedule]) -> Plan:
    """Return a plan for a step of new sizes: the cheapest of ``compiled`` that fits, unless fewer than `COMPILED` are
    given and a plan found at once is cheaper by more than `WORTH`. Without both, or for ``min`` and ``least``, search;
    if no plan fits, ``on_infeasible`` decides between an error and another plan."""
    graph = planner.problem(step)
    amount = planner.limit(graph).fixed
    if amount is not None:
        fitting = list[Plan]()
        for schedule in compiled:
            try:
                estimate = simulate(graph, schedule)
            except ProblemError:  # it repeats an op that may run only once at these sizes
                continue
            if estimate.peak <= amount:
                fitting.append(Plan(graph.name, "compiled", schedule, estimate, budget=amount))
        best = min(fitting, key=lambda plan: (plan.estimate.cost, plan.peak), default=None)
        # No more plans are compiled then.
        if best is not None and len(compiled) >= COMPILED:
            return best
        better = plan_at_once(graph, amount, planner.store)
        if best is not None and (
            better is None or best.estimate.overhead <= better.estimate.overhead + WORTH
        ):
            return best
        if better is not None:
            return better
    try:
        return planner.planned(step)
    except InfeasibleBudget as error:
        return planner.instead(step, error, first=False)
