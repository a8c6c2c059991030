"""The searches for a plan of a step within a budget: those that a call waits for, and those in the background."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

from rematplan.ir import InfeasibleBudget, TrainingGraph
from rematplan.planner.auto.auto_strategy import Auto
from rematplan.planner.background import shared
from rematplan.planner.bounds.cut_bounds import min_peak_bound
from rematplan.planner.caches.plan_store import PlanStore
from rematplan.planner.core.plan import Plan
from rematplan.planner.core.strategy import Progress, Strategy, silent
from rematplan.plans.budget_searches import least_plan, plan_within
from rematplan.plans.budgets import Budget
from rematplan.plans.first_plan import plan_at_once
from rematplan.plans.on_infeasible import accepts_refusals, explaining_refusals
from rematplan.plans.options import QUICK, PlanOptions
from rematplan.plans.progress import shapes_of
from rematplan.plans.refining import Refining, StepPlan, Wanted
from rematplan.runtime.graph.captured_step import CapturedStep

FURTHER = 0.25
"""The share of the time limit for planning a step if an earlier plan, made for other shapes, fits its budget.

The same ops on other shapes need similar plans. Whenever the earlier plan fitted, U-Net, ResNet-50 and a GPT came
within 0.2 points of the overhead found in the whole time. This was tried with half, double and one more than the first
batch.
"""
WAITING = 16
"""No further background search for a better plan is started while this many are running or queued, because each
keeps its planning problem in memory."""


def one_lane_plan(
    options: PlanOptions, store: PlanStore, graph: TrainingGraph, budget: Budget, progress: Progress
) -> Plan:
    """Return a plan of a problem whose ops run one after the other: the one stored for this budget, otherwise the
    result of a search. `InfeasibleBudget` if none is found."""
    found = store.get(graph, store_key(budget))
    if found is None:
        found = _searched(options, store, graph, budget, progress)
    return replace(found, fingerprint=graph.fingerprint)


def quick_plan(options: PlanOptions, store: PlanStore, graph: TrainingGraph, budget: Budget) -> None:
    """Store a plan within the budget that is found at once or by a short search; `InfeasibleBudget` if neither finds
    one. Nothing happens if the strategy is not `Auto`, or the budget is ``min``, ``least`` or below the proven
    floor."""
    amount, chosen = budget.fixed, options.strategy
    if amount is None or not isinstance(chosen, Auto) or amount < min_peak_bound(graph).bytes:
        return
    if (found := plan_at_once(graph, amount, store)) is not None:
        store.put(graph, amount, found)
    else:
        plan_within(replace(chosen, time_limit=QUICK), graph, amount, silent, store=store)


def _searched(
    options: PlanOptions, store: PlanStore, graph: TrainingGraph, budget: Budget, progress: Progress
) -> Plan:
    """Return a plan of a problem: one on disk that needs no further search, or one found at once and refined later,
    else that of a search. It is put into ``store``. For ``min`` and ``least`` it always searches; `InfeasibleBudget` if
    no plan is found."""
    amount, chosen = budget.fixed, options.strategy
    if amount is None:
        return least_plan(chosen, graph, progress, kind=budget.kind, store=store)
    known = store.solved(graph, amount, options.gap, options.time_limit) if chosen.lasting else None
    if known is not None:
        store.put(graph, amount, known)
        return known
    if options.refines and (found := plan_at_once(graph, amount, store)):
        store.put(graph, amount, found)
        return found
    with explaining_refusals(options, store, graph):
        for part in _in_parts(options, store, chosen, graph, amount):
            hurried = accepts_refusals(options, store)
            try:
                return plan_within(part, graph, amount, progress, store=store, hurried=hurried)
            except InfeasibleBudget as error:
                if part is chosen or (error.known == "proven" and accepts_refusals(options, store)):
                    raise
    raise AssertionError("the last part is the whole search")


def _in_parts(
    options: PlanOptions, store: PlanStore, chosen: Strategy, graph: TrainingGraph, budget: int
) -> Iterator[Strategy]:
    """Yield the strategies to run one after the other until one finds a plan: ``chosen`` last. `Auto` with less time
    comes first if ``budget`` bytes are not below the proven floor, and plans are refined later or a stored plan
    fits."""
    if isinstance(chosen, Auto) and budget >= min_peak_bound(graph).bytes:
        if options.refines:
            yield replace(chosen, time_limit=QUICK)
        elif store.serving(graph, budget) is not None:
            yield replace(chosen, time_limit=FURTHER * chosen.time_limit)
    # A tight budget is not refused for lack of time, and the error states a peak as small as ``min`` would
    # find.
    yield chosen


def background_search(
    options: PlanOptions, store: PlanStore, step: CapturedStep, graph: TrainingGraph, plan: Plan
) -> Refining | None:
    """Return a search in the background for a better plan, not begun. None if the options exclude it, the plan is
    within the gap or has no budget, such a search was made, or `WAITING` are queued."""
    # Within the stated gap of the optimum, no search is needed.
    if not options.refines or plan.budget is None or (plan.gap is not None and plan.gap <= options.gap):
        return None
    if shared().waiting >= WAITING:
        return None
    if (
        # An earlier search was as long as this one would be.
        options.strategy.lasting
        and store.solved(graph, plan.budget, options.gap, options.time_limit) is not None
    ):
        return None
    starts = store.starts(graph, plan.budget)
    limit = FURTHER * options.time_limit if starts else options.time_limit
    assert isinstance(options.strategy, Auto)
    search = replace(options.strategy, time_limit=limit)
    wanted = Wanted(graph, shapes_of(step), plan.budget, plan, search, starts)
    return Refining(
        wanted, lambda better: StepPlan(step, replace(better, fingerprint=graph.fingerprint)), store
    )


def store_key(budget: Budget) -> int | str:
    """Return the key under which plans within a budget are stored: its bytes, or ``min`` or ``least``. ``budget``: a
    budget in bytes, ``min`` or ``least``."""
    return budget.kind if budget.fixed is None else budget.fixed
