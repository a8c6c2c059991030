"""Curves of overhead against peak memory, for several strategies: the plans, the rows of a table, and CSV."""

from __future__ import annotations

import csv
import io
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

from rematplan.ir import LatticeTooLarge, TrainingGraph
from rematplan.planner.caches.plan_store import PlanStore
from rematplan.planner.core.plan import Plan, by_cost
from rematplan.planner.core.strategy import Progress, Strategy, pareto, silent
from rematplan.plans.budget_searches import stored_plans
from rematplan.plans.budgets import Budget

RIVAL_PEAKS = 3
"""A strategy that starts from known plans, such as `auto`, is also asked for plans at this many peaks of them."""

Curves = Mapping[str, Sequence[Plan]]
"""The plans of each strategy, by rising overhead and falling peak."""


@dataclass(frozen=True, slots=True)
class Row:
    """A row of a table: the plan of one strategy at one budget."""

    budget: str
    """The budget as the user wrote it."""
    strategy: str
    """The strategy's name."""
    plan: Plan | None
    """The plan; None if none fits."""
    smallest: int
    """The smallest peak of all plans of the strategy, in bytes."""
    best: bool = False
    """Whether the plan fits and no other strategy's plan has less overhead at this budget."""


def trace_curves(
    graph: TrainingGraph,
    strategies: Mapping[str, Strategy],
    budgets: Sequence[int],
    progress: Progress = silent,
) -> tuple[dict[str, tuple[Plan, ...]], tuple[str, ...]]:
    """Return the plans of each strategy at ``budgets`` in bytes, by rising overhead and falling peak. Return also a
    note on each strategy without plans: the problem is too large for it, or no plan fits."""
    store = PlanStore()
    found: dict[str, tuple[Plan, ...]] = {}
    notes = []
    order = sorted(strategies, key="auto".__eq__)  # auto is last: it starts from the others' plans
    for done, name in enumerate(order):
        strategy = strategies[name]

        def report(fraction: float, text: str, done: int = done, name: str = name) -> None:
            progress((done + fraction) / len(strategies), f"{name}: {text}" if text else name)

        report(0.0, "")
        try:
            others = [p for plans in found.values() for p in plans] if strategy.resumes else []
            asked = (*budgets, *rival_peaks(others, budgets))
            stored = stored_plans(strategy, graph, store) if strategy.resumes else ()
            plans = strategy.curve(graph, asked, report, (*others, *stored))
        except LatticeTooLarge as error:
            notes.append(str(error))
            continue
        for plan in plans if strategy.lasting else ():
            store.save(graph, plan)
        if plans:
            found[name] = plans
        else:
            notes.append(f"{name}: no plan fits any of these budgets")
    return {name: found[name] for name in strategies if name in found}, tuple(notes)


def rival_peaks(rivals: Sequence[Plan], budgets: Sequence[int]) -> tuple[int, ...]:
    """Return up to `RIVAL_PEAKS` evenly spread peaks of Pareto-optimal plans that recompute, not below the smallest
    budget."""
    front = [p for p in pareto(rivals) if p.estimate.reruns and p.estimate.peak >= min(budgets, default=0)]
    return tuple(p.estimate.peak for p in spread(front, RIVAL_PEAKS))


def rows_at(curves: Curves, budgets: Sequence[Budget], base_peak: int, whole: int) -> tuple[Row, ...]:
    """Return a row for each budget and strategy, with its plan of least overhead that fits, or None. ``base_peak``,
    ``whole``: bytes without recomputation, and of inputs and outputs, for shares."""
    rows: list[Row] = []
    for budget in budgets:
        here = [_row(budget, name, plans, base_peak, whole) for name, plans in curves.items()]
        least = min((r.plan.estimate.overhead for r in here if r.plan), default=None)
        rows += [replace(r, best=r.plan is not None and r.plan.estimate.overhead == least) for r in here]
    return tuple(rows)


def _row(budget: Budget, name: str, plans: Sequence[Plan], base_peak: int, whole: int) -> Row:
    smallest = min(p.estimate.peak for p in plans)
    limit = budget.bytes(base_peak, lambda: smallest, whole)
    fitting = [p for p in plans if p.estimate.peak <= limit]
    best = min(fitting, key=by_cost, default=None)
    return Row(budget.text, name, best, smallest)


def spread_places(length: int, count: int) -> list[int]:
    """Return at most ``count`` positions among ``length`` items, evenly spread, the first and the last included."""
    if length <= count:
        return list(range(length))
    return [round(i * (length - 1) / (count - 1)) for i in range(count)]


def spread(plans: Sequence[Plan], count: int) -> tuple[Plan, ...]:
    """Return at most ``count`` of ``plans``, at evenly spread positions, the first and the last included."""
    return tuple(plans[at] for at in spread_places(len(plans), count))


PlanPoint = tuple[str, int, float]
"""Strategy, peak in bytes and cost of a plan, which identify it among the plans of one problem."""


def key(plan: Plan) -> PlanPoint:
    """Return a plan's strategy, peak in bytes and cost in microseconds, which identify the plan in tables."""
    return plan.strategy, plan.estimate.peak, plan.estimate.cost


CSV_COLUMNS = (
    "strategy",
    "predicted_peak_bytes",
    "percent_of_no_recompute",
    "overhead_percent",
    "ops_recomputed",
    "measured_peak_bytes",
    "measured_seconds",
    "eager_seconds",
)


def curves_csv(curves: Curves, base: Plan, measured: Mapping[PlanPoint, tuple[int, float, float]]) -> str:
    """Return all plans of all curves as CSV text with the columns `CSV_COLUMNS`. ``base``: the plan without
    recomputation. ``measured``: by `key`, peak bytes, seconds, and seconds of eager mode."""
    out = io.StringIO()
    writer = csv.writer(out, lineterminator="\n")
    writer.writerow(CSV_COLUMNS)
    for name, plans in curves.items():
        for plan in plans:
            e = plan.estimate
            share = 100 * e.peak / base.estimate.peak if base.estimate.peak else 100.0
            row = (name, e.peak, f"{share:.3f}", f"{100 * e.overhead:.4f}", e.reruns)
            writer.writerow((*row, *measured.get(key(plan), ("", "", ""))))
    return out.getvalue()
