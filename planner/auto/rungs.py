"""Plans at peaks slightly above the smallest one: the optima of tiny problems, else annealed from their neighbours."""

from __future__ import annotations

import math
from collections.abc import Sequence

from rematplan.ir import TrainingGraph
from rematplan.planner.annealing.annealing_search import Search
from rematplan.planner.auto.eviction import plan_by_eviction
from rematplan.planner.auto.exhaustive import exhaustive
from rematplan.planner.core.effort import Effort
from rematplan.planner.core.peak_ladder import RUNGS
from rematplan.planner.core.plan import CLOSED, Plan, by_cost, by_peak, plan_from_runs
from rematplan.planner.core.schedule import runs_of
from rematplan.planner.core.search_rules import ANY_ORDER, SearchRules
from rematplan.planner.core.strategy import INTERRUPTS

TRIES, EVICTION = 16, 0.4
"""The most simulations of eviction for one peak, and the share of its effort that they may take."""


def rungs_above(
    graph: TrainingGraph,
    known: Sequence[Plan],
    effort: Effort,
    *,
    least: float = 1.02,
    rules: SearchRules = ANY_ORDER,
) -> list[Plan]:
    """Return plans found within budgets of `RUNGS` times the smallest peak of ``known``; factors below ``least`` are
    left out. So are budgets within which a known plan recomputes nothing; the others get equal efforts. Ctrl-C ends the
    search and is recorded in ``effort.interrupted``."""
    smallest, found = min(known, key=by_peak).peak, list[Plan]()
    budgets, costly = [int(share * smallest) for share in RUNGS if share >= least], list[int]()
    for budget in budgets:
        if any(plan.peak <= budget and _is_free(plan.estimate.overhead) for plan in known):
            continue
        below = min((p.estimate.cost for p in (*known, *found) if p.peak <= budget), default=math.inf)
        exact = None if rules.keep_order else exhaustive(graph, budget, below=below)
        if exact is None:
            costly.append(budget)
        elif exact.cost < below:
            found.append(plan_from_runs(graph, exact.runs, "exhaustive"))
    tries = effort.part(EVICTION * effort.left)
    for k, budget in enumerate(reversed(costly)):
        part = tries.part(tries.left / (len(costly) - k))
        evicted = plan_by_eviction(graph, budget, part, tries=TRIES, rules=rules)
        if evicted is None:
            break
        found.append(evicted)
    for k, budget in enumerate(costly):
        every = (*known, *found)
        fitting = min((plan for plan in every if plan.peak <= budget), key=by_cost)
        if _is_free(fitting.estimate.overhead):
            continue
        above = min((plan for plan in every if plan.peak > budget), key=by_peak, default=None)
        part = effort.part(effort.left / (len(costly) - k))
        search = Search(graph, budget, *rules, _is_free)
        try:
            search.run([runs_of(plan.schedule) for plan in (fitting, above) if plan is not None], part)
        except INTERRUPTS as interrupt:
            part.interrupt(interrupt)
        found += [plan for plan in (search.best, search.smallest) if plan is not None]
        if effort.interrupted:
            break
    return found


def _is_free(overhead: float) -> bool:
    return overhead <= CLOSED
