"""The two plans that a refusal names: the leanest one found, and the leanest of those with little overhead."""

from __future__ import annotations

from collections.abc import Sequence

from rematplan.ir import CHEAP, InfeasibleBudget, TrainingGraph
from rematplan.ir.errors import Known
from rematplan.planner.annealing.restarts import Search
from rematplan.planner.annealing.search_budget import SearchBudget
from rematplan.planner.arrays.precedence import needed_ops
from rematplan.planner.core.plan import Plan, by_peak, plan_from_runs
from rematplan.planner.core.schedule import runs_of
from rematplan.planner.core.strategy import INTERRUPTS

CHEAP_SHARE = 0.05
"""The share of a strategy's time limit, in addition to it, for finding the cheap plan."""
STEPS = 6
"""The largest number of budgets that are tried."""
RESOLUTION = 0.01
"""The search ends when the smallest such peak is known up to this share of it."""


def cheap_plan(
    graph: TrainingGraph,
    known: Sequence[Plan],
    effort: SearchBudget,
    *,
    seed: int = 0,
    keep_order: bool = False,
) -> Plan:
    """Return the plan with the smallest peak found among plans whose overhead is at most `CHEAP`.

    Budgets between the smallest known peak and the smallest peak at such an overhead are bisected. For each budget,
    the sequence of runs is annealed for an equal part of the effort, until a plan within the budget has at most this
    overhead. Ctrl-C ends the search with the best plan so far.

    Args:
        graph: the problem.
        known: plans of the problem, which keep its order if ``keep_order`` is set.
        effort: the time or number of moves that the search may spend.
        seed: the seed of the random choices.
        keep_order: whether the first runs of all ops keep the problem's order.
    """
    base = plan_from_runs(graph, [op.name for op in needed_ops(graph)], "store_all")
    least = min((*known, base), key=by_peak)
    best = min((p for p in (*known, base) if p.estimate.overhead <= CHEAP), key=by_peak)
    low, moves = least.estimate.peak, effort.moves // STEPS
    for _ in range(STEPS):
        high = best.estimate.peak
        if high - low <= RESOLUTION * high:
            break
        middle = (low + high) // 2
        search = Search(graph, middle, seed, keep_order, enough=lambda overhead: overhead <= CHEAP)
        starts = [runs_of(plan.schedule) for plan in (best, least)]
        try:
            found = search.run(
                starts, SearchBudget(effort.seconds / STEPS, max(1, moves) if effort.moves else 0)
            )
        except INTERRUPTS:
            return best
        if found is not None and found.estimate.overhead <= CHEAP:
            best = found
        else:
            low = middle
        if search.interrupted:
            break
    return best


def refusal(
    strategy: str,
    graph: TrainingGraph,
    budget: int,
    least: Plan,
    effort: SearchBudget,
    *,
    known: Known = "searched",
    seed: int = 0,
    keep_order: bool = False,
) -> InfeasibleBudget:
    """Return the error that no plan fits a budget. It names a budget that works, and one that costs little.

    Args:
        strategy: the name of the strategy that found no plan.
        graph: the problem.
        budget: the budget in bytes.
        least: the plan with the smallest peak found.
        effort: the time or number of moves for finding the cheap plan.
        known: why the budget is refused.
        seed: the seed of the random choices.
        keep_order: whether the first runs of all ops keep the problem's order.
    """
    cheap = cheap_plan(graph, [least], effort, seed=seed, keep_order=keep_order)
    least = min(least, cheap, key=by_peak)
    return InfeasibleBudget(strategy, budget, least.peak, known, plan=least, cheap=cheap.peak)
