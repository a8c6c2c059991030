"""What happens if no plan fits the budget (``on_infeasible``): what the error says, or which plan is used."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace

from rematplan.ir import InfeasibleBudget, TrainingGraph, show_bytes
from rematplan.planner.bounds.cut_bounds import min_peak_bound
from rematplan.planner.caches.plan_store import PlanStore
from rematplan.planner.core.plan import Plan
from rematplan.planner.peak_report import floor_text
from rematplan.planner.strategies.store_all import no_recompute
from rematplan.plans.budgets import unit_missing
from rematplan.plans.leanest_plan import leanest_plan
from rematplan.plans.options import LEAST, RAISE, PlanOptions
from rematplan.runtime.graph.warn import warn
from rematplan.runtime.problem.loss_boundary import reserved_for_loss, without_loss_bytes

MENTIONED = 0.01
"""The error that no plan fits names the memory for a loss if this is at least this share of the smallest peak found."""


def reaction(options: PlanOptions, first: bool) -> str:
    """Return what to do if no plan fits: ``raise`` for a saved plan, else as ``on_infeasible`` says, by default
    ``raise`` first, then ``least``."""
    if options.saved is not None:
        return RAISE
    return options.on_infeasible or (RAISE if first else LEAST)


def accepts_refusals(options: PlanOptions, store: PlanStore) -> bool:
    """Return whether another plan is used if no plan fits the budget, instead of raising the error."""
    return reaction(options, first=not store) != RAISE


def plan_over_budget(error: InfeasibleBudget, how: str, graph: TrainingGraph, name: str) -> Plan:
    """Return a plan to use after ``error``: of the smallest known peak if ``how`` is ``least``, else without
    recomputation. Warn, calling the model ``name``, if its peak exceeds the budget."""
    plan, what = no_recompute(graph), "a plan that recomputes nothing"
    if how == LEAST:
        plan = leanest_plan(graph, [error.plan] if error.plan else [])
        what = "the plan of the smallest found peak"
    if plan.peak > error.budget:
        warn(
            f"{error}. {name} runs with {what}; its peak is {show_bytes(plan.peak)} ({plan.peak} bytes), "
            f"above the budget of {show_bytes(error.budget)}"
        )
    return replace(plan, budget=max(plan.peak, error.budget), fingerprint=graph.fingerprint)


@contextmanager
def explaining_refusals(options: PlanOptions, store: PlanStore, graph: TrainingGraph) -> Iterator[None]:
    """Raise an `InfeasibleBudget` of the block again with what the user may change: memory for a loss, a percentage
    that an earlier plan fixed, or a missing unit. It is no longer called proven if only the default memory of a loss
    makes it so."""
    try:
        yield
    except InfeasibleBudget as error:
        aside, known, floor = reserved_for_loss(graph), error.known, error.floor
        stated = options.stated_budget()
        hint = unit_missing(stated, graph) or error.hint
        if options.loss_memory is None and aside:
            bare = without_loss_bytes(graph)
            must_hold = min_peak_bound(bare).bytes
            # The budget is too small only because of the memory for a loss.
            known = "room" if known == "proven" and error.budget >= must_hold else known
            floor = floor_text(bare) if floor else floor
        if options.loss_memory is None and aside >= MENTIONED * error.smallest:
            floor += (
                f"; {show_bytes(aside)} are set aside for a loss outside of the model; if it needs less, say so "
                f"with loss_memory= (cross entropy needs loss_memory='3x')"
            )
        if store and not (stated.is_lean or stated.kind == "bytes"):
            hint = (
                f"the first plan turned {options.budget} into this number of bytes; state one that is enough "
                f"for every call"
            )
        if (known, floor, hint) == (error.known, error.floor, error.hint):
            raise
        raise replace(error, known=known, floor=floor, hint=hint) from None
