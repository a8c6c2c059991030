"""Tables that show the predicted and the measured memory and time of a planned pipeline."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from rich.table import Table

from rematplan.ir import show_bytes
from rematplan.plan_report.labels import show_seconds
from rematplan.planner.pipeline.bubble_formulas import FORMULAS
from rematplan.planner.pipeline.pipeline_file import PlannedPipeline, StatedPipeline
from rematplan.planner.pipeline.rank_memory import message_buffers
from rematplan.report.tables import figures_table, pairs_table

if TYPE_CHECKING:
    from rematplan.pipeline.run_step import RankReport

COLUMNS = (
    "rank",
    "stages",
    "in flight",
    "kept a\nmicro-batch",
    "transients",
    "states and\ngradients",
    "torch's\nbuffers",
    "promised\npeak",
    "extra time",
)


def ranks_table(plan: PlannedPipeline) -> Table:
    """Return a table with one row per rank of a planned pipeline: what it holds, its peak, and its extra time."""
    title = f"{plan.problem}: {plan.schedule.name} within {show_bytes(plan.budget)} a rank"
    table = figures_table(title, *COLUMNS, left=2)
    for rank, numbers in enumerate(plan.schedule.stage_of_rank):
        own = [plan.stages[s] for s in numbers]
        base = sum(plan.times[s].total for s in numbers) - sum(one.times.extra for one in own)
        extra = sum(one.times.extra for one in own)
        table.add_row(
            str(rank),
            ", ".join(map(str, numbers)),
            " + ".join(str(plan.in_flight[s]) for s in numbers),
            " + ".join(show_bytes(one.held.kept) for one in own),
            show_bytes(max(one.transients.most for one in own)),
            show_bytes(sum(one.standing.states + one.held.gradients for one in own)),
            show_bytes(message_buffers(plan.schedule.actions[rank], own)),
            show_bytes(plan.peaks[rank]),
            f"{100 * extra / base if base else 0:.2f} %",
        )
    return table


def pipeline_table(plan: PlannedPipeline) -> Table:
    """Return a table of a pipeline's schedule: cuts, makespan, bubble, slowest stage with its floor, messages."""
    order, line, slowest = plan.schedule, plan.timeline, plan.slowest
    formula = FORMULAS[order.name]
    messages = [
        f"{show_bytes(one.sends)} forward and {show_bytes(two.returns)} backward"
        for one, two in zip(plan.times, plan.times[1:], strict=False)
    ]
    if len(set(messages)) == 1:
        messages = [f"{messages[0]} at each cut"]
    rows = {
        "schedule": f"{order.name}: {order.stages} stages on {order.ranks} ranks, {order.microbatches} micro-batches",
        "cuts": ", ".join(plan.names) or "none",
        "makespan": show_seconds(line.makespan / 1e6),
        "bubble": f"{100 * line.bubble:.2f} %; {100 * plan.ideal_bubble:.2f} % for equal stages and links that take no "
        f"time: {formula.text}",
        "slowest stage": f"{slowest}, {show_seconds(plan.times[slowest].total / 1e6)} per micro-batch",
        "its proven floor": f"{show_seconds(plan.floor / 1e6)} for any cuts and plans",
        "messages": "; ".join(messages) or "none",
    }
    return pairs_table("Timeline", rows)


def measured_ranks_table(plan: StatedPipeline, reports: Sequence[RankReport]) -> Table:
    """Return a table of predicted and measured peaks, one row per rank of a pipeline that was run."""
    title = f"{plan.problem}: {plan.schedule} within {show_bytes(plan.budget)} a rank, measured"
    columns = ("promised\npeak", "measured\npeak", "measured ÷\npromised", "extra time\na micro-batch")
    table = figures_table(title, "rank", *columns, left=0)
    for rank, one in enumerate(reports):
        share = f"{one.measured / one.promised:.3f}"
        cells = (show_bytes(one.promised), show_bytes(one.measured), share, show_seconds(one.extra / 1e6))
        table.add_row(str(rank), *cells)
    return table
