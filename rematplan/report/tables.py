"""Tables for the terminal that show plans, measurements and lists, and the formats of their numbers."""

from __future__ import annotations

import itertools
import math
import statistics
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from rich import box
from rich.table import Table

from rematplan.ir import TrainingGraph, show_bytes
from rematplan.plan_report.labels import LABELS, show_overhead, show_seconds, show_share
from rematplan.planner.core.inversion_error import gradient_error, inverses_run, worst_error
from rematplan.planner.core.peak_ladder import knee
from rematplan.planner.core.plan import Plan
from rematplan.planner.core.schedule import runs_of
from rematplan.planner.overlap.place_on_lanes import saved
from rematplan.planner.peak_report import peak_split
from rematplan.plans.budgets import LEAN
from rematplan.plans.tradeoff import Row, spread_places

if TYPE_CHECKING:  # a problem file is planned and shown without waiting for torch
    from rematplan.api import MeasuredPlan, StepReport
    from rematplan.auditing.audit import Audit
    from rematplan.auditing.faults import Fault
    from rematplan.models import ZooEntry
    from rematplan.planner.family.range_proof import RangeRow
    from rematplan.plans.range_planning import RangePlan
    from rematplan.report.comparison_row import Rival

ALWAYS = ("parameters", "buffers", "batch", "activations", "gradients", "workspace")
"""The kinds of memory that are shown for every captured training step, even if they have 0 bytes."""


def show_lanes(plan: Plan) -> str:
    """Describe the predicted peak and time of a plan, which must have two lanes, in one line."""
    assert plan.lanes is not None
    share = 100 * saved(plan, plan.estimate.cost)
    return (
        f"at most {show_bytes(plan.lanes.peak)} ({plan.lanes.peak} bytes) at any speed of the lanes; "
        f"{abs(share):.1f} % {'less' if share >= 0 else 'more'} time predicted than on one, "
        f"each lane at {plan.lanes.speed:.2f} of its speed while both run"
    )


def split_for_people(graph: TrainingGraph, plan: Plan) -> dict[str, int]:
    """Return the bytes at a plan's peak by kind of memory, with the names of `LABELS`. Kinds without bytes are left
    out, except those of `ALWAYS` for a captured step."""
    found = {LABELS.get(kind, kind): n for kind, n in peak_split(graph, plan.schedule).items()}
    # Kinds with 0 bytes are shown for a captured training step.
    shown = dict.fromkeys(ALWAYS, 0) if graph.fixed_split else {}
    return {name: n for name, n in (shown | found).items() if n or name in shown}


def pairs_table(title: str, rows: Mapping[str, str] | Sequence[tuple[str, str]]) -> Table:
    """Return a table with two columns: the keys of ``rows``, and their values."""
    table = Table(title=title, box=box.SIMPLE, show_header=False, title_justify="left", title_style="bold")
    table.add_column(overflow="fold")
    table.add_column(overflow="fold")
    for name, value in rows.items() if isinstance(rows, Mapping) else rows:
        table.add_row(name, value)
    return table


def split_table(graph: TrainingGraph, base: Plan, plan: Plan) -> Table:
    """Return a table of the bytes at the peak by kind, without recomputation (``base``) and for ``plan``."""
    split = {"no recompute": split_for_people(graph, base), "planned": split_for_people(graph, plan)}
    return bytes_table(
        f"{graph.name}: bytes held at the peak", split, (base.estimate.peak, plan.estimate.peak)
    )


def bytes_table(title: str, columns: Mapping[str, Mapping[str, int]], peaks: Sequence[int]) -> Table:
    """Return a table of the bytes at the peak by kind. ``columns``: by title, the bytes of each kind. ``peaks``: of
    the columns."""
    table = figures_table(title, "", *columns)
    for kind in dict.fromkeys(kind for column in columns.values() for kind in column):
        table.add_row(kind, *(show_bytes(column.get(kind, 0)) for column in columns.values()))
    table.add_section()
    table.add_row("peak", *map(show_bytes, peaks))
    return table


def ladder_table(plan: Plan) -> Table:
    """Return a table of the cheapest plans found from the smallest peak up: what a little more memory saves."""
    table = figures_table("Near the smallest peak", "peak", "of the smallest", "overhead", "")
    best = knee(plan.near)
    for peak, overhead in plan.near:
        what = "this plan" if peak == plan.peak else "the knee" if (peak, overhead) == best else ""
        table.add_row(show_bytes(peak), show_share(peak, plan.near[0][0]), f"{100 * overhead:.2f} %", what)
    return table


def plan_table(graph: TrainingGraph, plan: Plan, base: Plan, error: float) -> Table:
    """Return a table of a plan's figures; ``base``: the plan without recomputation. ``error``: the predicted relative
    error of tensors that the backward reads, 0 if gradients are bit-equal."""
    e = plan.estimate
    rows = {
        "strategy": plan.strategy,
        "budget": "none" if plan.budget is None else f"{show_bytes(plan.budget)} ({plan.budget} bytes)",
        "predicted peak": f"{show_bytes(e.peak)} ({e.peak} bytes), "
        f"{show_share(e.peak, base.estimate.peak)} of no recompute",
        "overhead": show_overhead(plan),
        "ops recomputed": f"{e.reruns} (the step has {len(runs_of(base.schedule))})",
        "status": plan.status,
    }
    if inversions := inverses_run(graph, runs_of(plan.schedule)):
        worst = worst_error(graph, plan.schedule)
        rows["tensors recovered"] = f"{inversions} by inverses, predicted relative error " + (
            f"at most {worst:.1e}" if worst else "0: numbers are only moved"
        )
    if error:
        rows["gradients"] = (
            f"not bit-equal: predicted relative error {gradient_error(error):.1e} where a ReLU or a maximum reads "
            f"tensors wrong by {error:.1e}, and more in tensors of few elements; {error:.1e} where all is smooth"
        )
    if plan.lanes:
        rows["two lanes"] = show_lanes(plan)
    if plan.lower_bound is not None:
        rows["proven floor of the overhead"] = f"{100 * plan.lower_bound:.2f} %"
    return pairs_table(f"Plan of {plan.problem}", rows)


def trade_off_table(name: str, base: Plan, rows: Sequence[Row]) -> Table:
    """Return a table of strategies' plans, one section per budget with its best plan bold; rows of a budget
    are consecutive."""
    columns = ("predicted\npeak", "of no\nrecompute", "overhead", "ops\nrecomputed")
    table = figures_table(f"{name}: memory against time", "budget", "strategy", *columns, left=2)
    table.add_row("none", base.strategy, *_cells(base, base), end_section=True)
    for budget, group in itertools.groupby(rows, lambda row: row.budget):
        here = list(group)
        if not any(row.plan for row in here):
            least = min(row.smallest for row in here)
            table.add_row(budget, "none reaches it", _smallest(least), "–", "–", "–", style="dim")
        else:
            shown = (
                f"{budget} +{LEAN[budget]:.0%}" if LEAN.get(budget) else budget
            )  # it is not the smallest found
            for i, row in enumerate(here):
                cells = _cells(row.plan, base) if row.plan else (_smallest(row.smallest), "–", "–", "–")
                style = "bold" if row.best else None if row.plan else "dim"
                table.add_row("" if i else shown, row.strategy, *cells, style=style)
        table.add_section()
    return table


def _smallest(peak: int) -> str:
    return f"smallest found {show_bytes(peak)}"


def _cells(plan: Plan, base: Plan) -> tuple[str, ...]:
    peak = plan.estimate.peak
    return (
        show_bytes(peak),
        show_share(peak, base.estimate.peak),
        show_overhead(plan),
        str(plan.estimate.reruns),
    )


def measured_table(name: str, measured: Sequence[MeasuredPlan]) -> Table:
    """Return a table of measured peaks and times. Overheads are relative to the first item, the plan without
    recomputation."""
    table = figures_table(
        f"{name}: measured on this machine, median of {len(measured[0].seconds)} rounds",
        "strategy",
        "predicted\npeak",
        "measured\npeak",
        "step time",
        "predicted\noverhead",
        "measured\noverhead",
        "least to\nlargest",
        left=1,
    )
    for one in measured:
        low, middle, high = (f"{100 * share:.1f} %" for share in one.overheads(measured[0]))
        if one.plan is None:
            table.add_section()
        table.add_row(
            one.plan.strategy if one.plan else "plain autograd",
            show_bytes(one.plan.estimate.peak) if one.plan else "–",
            show_bytes(one.peak),
            show_seconds(statistics.median(one.seconds)),
            show_overhead(one.plan) if one.plan else "–",
            middle,
            f"{low} to {high}",
        )
    return table


def step_table(name: str, report: StepReport) -> Table:
    """Return a table of a planned step that was run, next to plain autograd."""
    predicted, measured = report.plan.peak, report.measured_peak
    rows = {
        "predicted peak": show_bytes(predicted),
        "measured peak": f"{show_bytes(measured)} ({100 * (measured / max(predicted, 1) - 1):+.2f} %)",
        "eager's measured peak": show_bytes(report.eager_peak),
        "step time": f"{show_seconds(report.seconds)} (overhead predicted {show_overhead(report.plan)})",
        "eager's step time": show_seconds(report.eager_seconds),
        "planned ÷ eager": f"{report.seconds / report.eager_seconds:.3f} (the overhead counts ops alone; between them "
        "eager mode spends time on its autograd graph, and a planned step does not)",
        "loss": ", ".join(f"{loss:.6g}" for loss in report.losses),
    }
    if report.one_lane_seconds is not None:
        rows["on one lane"] = (
            f"{show_seconds(report.one_lane_seconds)}; two ÷ one: {report.seconds / report.one_lane_seconds:.3f}"
        )
    if report.verification is not None:
        rows["verification"] = str(report.verification)
    return pairs_table(f"Step of {name}, strategy {report.plan.strategy}", rows)


def comparison_table(name: str, budget: int, rivals: Sequence[Rival]) -> Table:
    """Return a table of plans: whether each fits ``budget`` bytes, its peak, extra time and error. Plain autograd is
    its last row if the first plan was run."""
    columns = (
        "fits",
        "predicted\npeak",
        "measured\npeak",
        "extra time\npredicted",
        "step time\nagainst eager",
    )
    errors = ("error recovered,\npredicted", "gradient error\nmeasured")
    table = figures_table(f"{name} within {show_bytes(budget)}", "", *columns, *errors)
    for r in rivals:
        report, fits = r.report, r.fits(budget)
        measured = ("–", "–")
        if report:
            share = f"× {report.seconds / report.eager_seconds:.3f}"
            measured = (show_bytes(report.measured_peak), share)
        table.add_row(
            r.name,
            fits,
            show_bytes(r.plan.peak),
            measured[0],
            f"{100 * r.extra:.2f} %",
            measured[1],
            _error(r.error),
            "–" if r.gradient_error is None else _error(r.gradient_error),
            style="dim" if fits == "no" else None,
        )
    if rivals and (first := rivals[0].report):
        table.add_section()
        peak = show_bytes(first.eager_peak)
        table.add_row("eager autograd", "–", "–", peak, "–", "× 1.000", "–", "–")
    return table


def _error(error: float) -> str:
    return f"{error:.1e}" if error else "0"


def models_table(entries: Sequence[tuple[ZooEntry, int]]) -> Table:
    """Return a table of rematplan's networks. ``entries``: pairs of a network and its number of parameters."""
    table = figures_table("Networks", "name", "", "sizes", "parameters", left=3)
    for entry, parameters in entries:
        sizes = ", ".join(f"{name} {size}" for name, size in entry.sizes.items())
        table.add_row(entry.name, entry.summary, sizes, f"{parameters:,}")
    return table


def devices_table(rows: Sequence[Mapping[str, Any]]) -> Table:
    """Return a table of device models from the rows of ``rematplan info devices``."""
    columns = ("TFLOP/s\nfloat32", "TFLOP/s\nfloat16", "GB/s", "launch\nµs")
    keys = ("teraflops_float32", "teraflops_float16", "gigabytes_a_second", "launch_microseconds")
    table = figures_table("Device models", "name", "", *columns, left=2)
    for row in rows:
        mark = " (default)" if row["default"] else ""
        table.add_row(row["name"] + mark, row["summary"], *(f"{row[key]:g}" for key in keys))
    return table


def figures_table(title: str, *columns: str, left: int = 1) -> Table:
    """Return an empty table with column titles. The first ``left`` columns are aligned to the left."""
    table = Table(title=title, box=box.SIMPLE_HEAD, title_justify="left", title_style="bold")
    for i, column in enumerate(columns):
        table.add_column(column, justify="left" if i < left else "right", no_wrap=i >= left, overflow="fold")
    return table


MOST_RESULTS = 3
"""The largest number of results that are listed for a fault."""


def fault_lines(audit: Audit) -> list[str]:
    """Return for each fault what is wrong and where, what differs, and what to change."""
    return [line for at, fault in enumerate(audit.faults, 1) for line in _lines(at, fault)]


def _lines(at: int, fault: Fault) -> list[str]:
    more = len(fault.results) - MOST_RESULTS
    results = ", ".join(fault.results[:MOST_RESULTS]) + (f" and {more} more" if more > 0 else "")
    size = "" if math.isinf(fault.error) else f", at most {fault.error:.1e} relative"
    lines = [f"{at}. {fault}", f"   differs: {results}{size}"]
    return [*lines, f"   change: {fault.advice}"] if fault.advice else lines


def audit_table(audit: Audit) -> Table:
    """Return a table of peak and time: without checkpointing, with the model's own, and with a plan at that peak."""
    table = figures_table(f"{audit.name}: one step", "", "peak", "time", "against plain")
    rows = {"plain": audit.plain, "its own checkpointing": audit.own, "a plan at that peak": audit.planned}
    for name, row in rows.items():
        if row is not None:
            more = f"{100 * (row.seconds / audit.plain.seconds - 1):+.0f} %" if row is not audit.plain else ""
            table.add_row(name, show_bytes(row.peak), show_seconds(row.seconds), more)
    return table


SIZES = 12
"""The number of evenly spread sizes that `range_table` shows."""


def range_table(name: str, plan: RangePlan) -> Table:
    """Return a table of the predicted peak and overhead at the sizes that `shown_rows` picks."""
    proof = plan.proof
    title = f"{name}: {plan.members} plans for {len(proof.rows)} sizes within {show_bytes(proof.budget)}"
    columns = ("predicted\npeak", "of no\nrecompute", "overhead", "ops\nrecomputed", "bytes")
    table = figures_table(title, plan.dimension, *columns, left=0)
    for at in shown_rows(proof.rows):
        row = proof.rows[at]
        e = row.estimate
        known = "captured" if row.size in plan.captured else "computed"
        share = show_share(e.peak, row.base_peak)
        if row.fits:
            cells = (show_bytes(e.peak), share, f"{100 * e.overhead:.2f} %", str(e.reruns))
            table.add_row(str(row.size), *cells, known)
        else:
            proven = row.size in plan.proven
            told = "proven that none fits" if proven else f"smallest found {show_bytes(e.peak)}"
            table.add_row(str(row.size), told, "–", "–", "–", known, style="dim")
    return table


def shown_rows(rows: Sequence[RangeRow[int]]) -> list[int]:
    """Return, ascending, about `SIZES` evenly spread positions, and neighbours of which one fits and one does not."""
    edges = {k + d for k in range(len(rows) - 1) for d in (0, 1) if rows[k].fits is not rows[k + 1].fits}
    return sorted({*spread_places(len(rows), SIZES), *edges})
