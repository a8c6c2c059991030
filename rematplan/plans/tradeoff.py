"""The memory/overhead trade-off of a problem: curves, and the rows of a table strategy × budget."""

from __future__ import annotations

import csv
import io
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from rematplan.ir import LatticeTooLarge, TrainingGraph
from rematplan.planner.caches.plan_store import PlanStore
from rematplan.planner.core.plan import Plan
from rematplan.planner.core.strategy import Progress, Strategy, pareto, silent
from rematplan.plans.budgets import Budget, known_plans

RIVAL_PEAKS = 3
"""At how many of the other strategies' peaks `auto` is asked for a plan too."""

Curves = Mapping[str, Sequence[Plan]]
"""By strategy, its plans by rising overhead and falling peak."""


@dataclass(frozen=True, slots=True)
class Row:
    """What a strategy offers at a budget.

    ``plan``: None if nothing fits. ``smallest``: the least peak it reaches. ``best``: no other has
    less overhead at this budget.
    """

    budget: str
    strategy: str
    plan: Plan | None
    smallest: int
    best: bool = False


def trace_curves(
    graph: TrainingGraph,
    strategies: Mapping[str, Strategy],
    budgets: Sequence[int],
    progress: Progress = silent,
    store: PlanStore | None = None,
) -> tuple[dict[str, tuple[Plan, ...]], tuple[str, ...]]:
    """The curve of each strategy, and a note on each strategy that has none (a problem too large, say).

    A strategy that resumes from other plans (`auto`) comes last. It starts from all plans of the others, and is also
    asked for some of their peaks, so that its curve is nowhere above theirs. ``store``: plans on disk, from which the
    curves start and in which they are kept.
    """
    store = PlanStore() if store is None else store
    found: dict[str, tuple[Plan, ...]] = {}
    notes = []
    order = sorted(strategies, key="auto".__eq__)  # auto is last, for it begins with what others have found
    for done, name in enumerate(order):
        strategy = strategies[name]

        def report(fraction: float, text: str, done: int = done, name: str = name) -> None:
            progress((done + fraction) / len(strategies), f"{name}: {text}" if text else name)

        report(0.0, "")
        try:
            others = [p for plans in found.values() for p in plans] if strategy.resumes else []
            asked = (*budgets, *rival_peaks(others, budgets))
            plans = strategy.curve(graph, asked, report, (*others, *known_plans(strategy, graph, store)))
        except LatticeTooLarge as error:
            notes.append(str(error))
            continue
        for plan in plans if strategy.lasting else ():
            store.keep(graph, plan)
        if plans:
            found[name] = plans
        else:
            notes.append(f"{name}: no plan within these budgets")
    return {name: found[name] for name in strategies if name in found}, tuple(notes)


def rival_peaks(rivals: Sequence[Plan], budgets: Sequence[int]) -> tuple[int, ...]:
    """At most `RIVAL_PEAKS` peaks along the best curve of the rivals, at and above the least budget."""
    front = [p for p in pareto(rivals) if p.estimate.reruns and p.estimate.peak >= min(budgets, default=0)]
    return tuple(p.estimate.peak for p in spread(front, RIVAL_PEAKS))


def rows_at(curves: Curves, budgets: Sequence[Budget], base_peak: int, whole: int) -> tuple[Row, ...]:
    """The table's rows: each strategy's plan of least overhead at each budget (``min``: its smallest).

    ``base_peak`` and ``whole`` as for `Budget.bytes`.
    """
    rows: list[Row] = []
    for budget in budgets:
        here = [_row(budget, name, plans, base_peak, whole) for name, plans in curves.items()]
        least = min((r.plan.estimate.overhead for r in here if r.plan), default=None)
        rows += [
            Row(
                r.budget,
                r.strategy,
                r.plan,
                r.smallest,
                r.plan is not None and r.plan.estimate.overhead == least,
            )
            for r in here
        ]
    return tuple(rows)


def _row(budget: Budget, name: str, plans: Sequence[Plan], base_peak: int, whole: int) -> Row:
    smallest = min(p.estimate.peak for p in plans)
    limit = budget.bytes(base_peak, lambda: smallest, whole)
    fitting = [p for p in plans if p.estimate.peak <= limit]
    best = min(fitting, key=lambda p: (p.estimate.cost, p.estimate.peak), default=None)
    return Row("smallest" if budget.kind == "min" else budget.text, name, best, smallest)


def spread(plans: Sequence[Plan], count: int) -> tuple[Plan, ...]:
    """At most ``count`` plans, evenly along the curve, both ends among them."""
    if len(plans) <= count:
        return tuple(plans)
    return tuple(plans[round(i * (len(plans) - 1) / (count - 1))] for i in range(count))


Key = tuple[str, int, float]


def key(plan: Plan) -> Key:
    """What tells the plans of one problem's curves apart."""
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


def curves_csv(curves: Curves, base: Plan, measured: Mapping[Key, tuple[int, float, float]]) -> str:
    """Every point of every curve as CSV.

    ``measured``: by the `key` of a plan that was run, its measured peak in bytes, its and eager's seconds.
    """
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
