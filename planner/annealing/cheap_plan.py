"""The error for a budget that is too small, with the smallest peak found, and the smallest at little overhead."""

from __future__ import annotations

from collections.abc import Sequence

from rematplan.ir import CHEAP, InfeasibleBudget, TrainingGraph
from rematplan.ir.errors import Known
from rematplan.planner.annealing.annealing_search import Search
from rematplan.planner.arrays.precedence import needed_ops
from rematplan.planner.core.effort import Effort
from rematplan.planner.core.plan import Plan, by_peak, plan_from_runs
from rematplan.planner.core.schedule import runs_of
from rematplan.planner.core.search_rules import ANY_ORDER, SearchRules
from rematplan.planner.core.strategy import INTERRUPTS

CHEAP_SHARE = 0.05
"""The time for finding the smallest peak of plans of little overhead, as a share of a strategy's time limit. It is
spent in addition to the limit."""
STEPS = 6
"""The largest number of budgets that `cheap_plan` tries."""
RESOLUTION = 0.01
"""`cheap_plan` ends when the smallest peak of a cheap plan is known up to this share of the peak."""


def cheap_plan(
    graph: TrainingGraph,
    known: Sequence[Plan],
    effort: Effort,
    *,
    rules: SearchRules = ANY_ORDER,
) -> Plan:
    """Return the plan with the smallest peak found of those with an overhead of at most `CHEAP`, by bisection. It
    begins with the ``known`` plans and the one without recomputation. After Ctrl-C, the best plan so far is
    returned."""
    base = plan_from_runs(graph, [op.name for op in needed_ops(graph)], "store_all")
    least = min((*known, base), key=by_peak)
    best = min((p for p in (*known, base) if p.estimate.overhead <= CHEAP), key=by_peak)
    low, share = least.estimate.peak, effort.total / STEPS
    for _ in range(STEPS):
        high = best.estimate.peak
        if high - low <= RESOLUTION * high:
            break
        middle = (low + high) // 2
        search = Search(graph, middle, *rules, enough=lambda overhead: overhead <= CHEAP)
        starts, part = [runs_of(plan.schedule) for plan in (best, least)], effort.part(share)
        try:
            found = search.run(starts, part)
        except INTERRUPTS:
            return best
        if found is not None and found.estimate.overhead <= CHEAP:
            best = found
        else:
            low = middle
        if part.interrupted:
            break
    return best


def refusal(
    strategy: str,
    graph: TrainingGraph,
    budget: int,
    least: Plan,
    effort: Effort,
    *,
    known: Known = "searched",
    rules: SearchRules = ANY_ORDER,
) -> InfeasibleBudget:
    """Search for the smallest peak at an overhead of at most `CHEAP`. Return the error that no plan fits ``budget``
    bytes, which states this peak and the smallest found. ``least``: the plan of the smallest peak so far. ``known``:
    what is known about the budget."""
    cheap = cheap_plan(graph, [least], effort, rules=rules)
    least = min(least, cheap, key=by_peak)
    return InfeasibleBudget(
        strategy, budget, least.peak, known, plan=least, cheap=cheap.peak, cheap_plan=cheap
    )
