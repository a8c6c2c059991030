"""Plans at peaks slightly above the smallest one: the optima of tiny problems, else annealed from their neighbours."""

from __future__ import annotations

from collections.abc import Sequence

from rematplan.ir import TrainingGraph
from rematplan.planner.annealing.restarts import Search
from rematplan.planner.core.effort import Effort
from rematplan.planner.core.peak_ladder import RUNGS
from rematplan.planner.core.plan import CLOSED, Plan, by_cost, by_peak, plan_from_runs
from rematplan.planner.core.schedule import runs_of
from rematplan.planner.core.strategy import INTERRUPTS
from rematplan.planner.ilp.exhaustive import exhaustive


def rungs_above(
    graph: TrainingGraph,
    known: Sequence[Plan],
    effort: Effort,
    *,
    least: float = 1.02,
    seed: int = 0,
    keep_order: bool = False,
) -> list[Plan]:
    """Return plans found at the peaks `RUNGS` from ``least`` times the smallest known peak up, with equal
    efforts, until one costs nothing.

    Ctrl-C ends the search and is recorded in ``effort.interrupted``.
    """
    smallest, found = min(known, key=by_peak).peak, list[Plan]()
    shares = [share for share in reversed(RUNGS) if share >= least]
    for k, share in enumerate(shares):
        budget = int(share * smallest)
        fitting = [plan for plan in (*known, *found) if plan.peak <= budget]
        cheapest = min(fitting, key=by_cost)
        if _is_free(cheapest.estimate.overhead):
            break
        exact = None if keep_order else exhaustive(graph, budget)
        if exact is not None:
            found.append(plan_from_runs(graph, exact.runs, "exhaustive"))
            continue
        starts = dict.fromkeys([cheapest, *found[-1:]])
        search = Search(graph, budget, seed, keep_order, _is_free)
        part = effort.part(effort.left / (len(shares) - k))
        try:
            plan = search.run([runs_of(start.schedule) for start in starts], part)
        except INTERRUPTS as interrupt:
            effort.interrupted = interrupt
            break
        found += [plan] if plan is not None else []
        if search.interrupted:
            effort.interrupted = KeyboardInterrupt()
            break
    return found


def _is_free(overhead: float) -> bool:
    return overhead <= CLOSED
