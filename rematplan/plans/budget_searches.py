"""Search for plans within a budget, and for those near the smallest peak, with the plans that are stored."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from rematplan.ir import InfeasibleBudget, TrainingGraph
from rematplan.planner.auto.min_budget_plan import cheapest_near_smallest_peak
from rematplan.planner.auto.smallest_peak_search import find_smallest_peak
from rematplan.planner.bounds.cut_bounds import min_peak_bound
from rematplan.planner.caches.plan_store import PlanStore
from rematplan.planner.core.effort import Effort
from rematplan.planner.core.plan import Plan, by_cost, by_peak
from rematplan.planner.core.search_rules import rules_of
from rematplan.planner.core.strategy import Progress, Strategy, silent
from rematplan.planner.peak_report import floor_text
from rematplan.planner.registry import LIMIT
from rematplan.planner.strategies.anneal import Anneal
from rematplan.plans.budgets import LEAN
from rematplan.plans.leanest_plan import check_floor


def plan_within(
    strategy: Strategy,
    graph: TrainingGraph,
    budget: int,
    progress: Progress = silent,
    *,
    store: PlanStore | None = None,
    starts: Sequence[Plan] = (),
    hurried: bool = False,
) -> Plan:
    """Search for a plan within ``budget`` bytes from ``starts``, and from stored plans if the strategy resumes; store
    and return it. If none is found, store and raise `InfeasibleBudget`; a stored refusal that still holds is raised
    without a search. ``hurried``: whether a budget below a proven floor is refused without a search, if the strategy
    resumes."""
    store = PlanStore() if store is None else store
    limit = float(getattr(strategy, LIMIT, 0.0))
    stored = (*starts, *stored_plans(strategy, graph, store))
    refusal = store.refusal(graph, budget, limit)
    if refusal and all(plan.peak >= refusal.smallest for plan in stored):
        raise refusal
    known_ones = stored if strategy.resumes else starts
    try:
        if hurried and strategy.resumes:
            check_floor(strategy, graph, budget, stored, lean=store.has_lean_plans(graph))
        plan = _plan_or_lower(strategy, graph, budget, progress, known_ones, stored)
    except InfeasibleBudget as error:
        for known_one in error.plans if strategy.lasting else ():
            store.save(graph, known_one)
        known = "proven" if budget < min_peak_bound(graph).bytes else error.known
        error = replace(error, budget=budget, known=known, floor=floor_text(graph))
        store.refuse(graph, error, limit)
        raise error from None
    store.put(graph, budget, plan, lasting=strategy.lasting)
    return plan


def _plan_or_lower(
    strategy: Strategy,
    graph: TrainingGraph,
    budget: int,
    progress: Progress,
    starts: Sequence[Plan],
    stored: Sequence[Plan],
) -> Plan:
    """Return the strategy's plan, searched from ``starts``; `InfeasibleBudget` if none is found. Before that, an
    `Anneal` limited in moves also searches from ``stored`` for the smallest peak, and starts again from a plan that
    fits, if any."""
    try:
        return strategy.plan(graph, budget, progress, starts)
    except InfeasibleBudget as error:
        if not isinstance(strategy, Anneal) or not strategy.moves:
            raise
        effort, rules = Effort(moves=-(-strategy.moves // 2)), rules_of(strategy)
        # A budget that ``min`` can meet is not refused.
        least = find_smallest_peak(graph, effort, stored, progress, enough=budget, rules=rules)
        if least.peak > budget:
            for slack in LEAN.values():  # each may end at another peak
                near = cheapest_near_smallest_peak(
                    graph,
                    strategy.time_limit,
                    progress,
                    slack=slack,
                    moves=strategy.moves,
                    rules=rules,
                    starts=stored,
                )
                least = min(least, near, key=by_peak)
        if least.peak <= budget:
            fitting = min((plan for plan in (least, *stored) if plan.peak <= budget), key=by_cost)
            try:
                return strategy.plan(graph, budget, progress, (fitting, *starts))
            except InfeasibleBudget:  # the plan fits nevertheless
                return replace(fitting, budget=budget)
        if least.peak < error.smallest:
            raise replace(error, smallest=least.peak, plan=least) from None
        raise


def stored_plans(strategy: Strategy, graph: TrainingGraph, store: PlanStore) -> tuple[Plan, ...]:
    """Return the stored plans of a problem: those in memory, then those on disk if the strategy uses plans on disk."""
    return (*store.nearest(graph), *(store.saved(graph) if strategy.lasting else ()))


def least_plan(
    strategy: Strategy,
    graph: TrainingGraph,
    progress: Progress = silent,
    *,
    kind: str = "min",
    time_limit: float | None = None,
    starts: Sequence[Plan] = (),
    store: PlanStore | None = None,
) -> Plan:
    """Search for the cheapest plan with a peak of at most 1 + ``LEAN[kind]`` times the smallest found; put it into
    ``store`` under ``kind``, and return it. Only strategies with a time limit use ``time_limit`` (None: their own) and
    ``starts``."""
    store, slack = PlanStore() if store is None else store, LEAN[kind]
    if hasattr(strategy, LIMIT):
        limit = getattr(strategy, LIMIT) if time_limit is None else time_limit
        known = (*starts, *stored_plans(strategy, graph, store))

        def cheapest(left: float) -> Strategy:
            changed: dict[str, Any] = {LIMIT: left}
            return replace(strategy, **changed)

        plan = cheapest_near_smallest_peak(
            graph,
            limit,
            progress,
            slack=slack,
            moves=strategy.counted,
            rules=rules_of(strategy),
            starts=known,
            cheapest=cheapest,
        )
    else:
        try:
            plan = strategy.plan(graph, 0, progress)
        except InfeasibleBudget as error:
            plan = strategy.plan(graph, error.smallest + int(slack * error.smallest), progress)
    store.put(graph, kind, plan, lasting=strategy.lasting)
    return plan
