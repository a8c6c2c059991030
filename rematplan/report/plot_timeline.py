"""A diagram of a planned pipeline: which forwards and backwards each rank runs at which time, and the rank's peak."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.patches import Patch

from rematplan.ir import show_bytes
from rematplan.plan_report.labels import unit_of
from rematplan.planner.pipeline.pipeline_file import PlannedPipeline
from rematplan.planner.pipeline.timeline import Timeline
from rematplan.report.plot import COLOURS, save_png

KINDS: Mapping[str, tuple[str, str]] = {
    "F": ("forward", COLOURS[5]),
    "B": ("backward", COLOURS[4]),
    "I": ("gradient of the input", COLOURS[1]),
    "W": ("gradients of the weights", COLOURS[2]),
}
"""For each kind of action (forward, backward or a part of it), its name in the legend and its colour."""
LIGHT = 0.55
"""The opacity of the last stage of a rank that has several; the first one has 1."""
ABOVE: Mapping[str, Any] = {
    "loc": "lower center",
    "bbox_to_anchor": (0.5, 1.0),
    "ncols": 5,
    "fontsize": 8,
    "frameon": False,
}
"""The place and look of a legend above its diagram."""
LONGEST_NAME = 60
"""The most characters of a model's name in the title."""
NUMBERED = 1 / 90
"""An action that takes at least this share of the makespan is labelled with its micro-batch's number."""


def save_timeline(path: Path, plan: PlannedPipeline) -> None:
    """Draw a planned pipeline over time, and the ranks' predicted peaks, to a PNG file, completely or not at all."""
    save_png(timeline_figure(plan), path)


def timeline_figure(plan: PlannedPipeline) -> Figure:
    """Return the picture that `save_timeline` writes."""
    ranks = plan.schedule.ranks
    figure = Figure(figsize=(13, 1.8 + 0.55 * ranks), layout="constrained")
    times, peaks = figure.subplots(1, 2, width_ratios=(5, 1))
    draw_timeline(times, plan.timeline)
    unit, scale = unit_of(max(plan.peaks))
    peaks.barh(range(ranks), [peak / scale for peak in plan.peaks], color=COLOURS[0], height=0.7)
    if plan.budget <= 4 * max(plan.peaks):
        peaks.axvline(plan.budget / scale, color="black", linestyle="--", linewidth=1, label="budget")
        peaks.legend(**ABOVE)
    peaks.set_xlabel(f"promised peak ({unit})")
    for axes in (times, peaks):
        axes.set_yticks(range(ranks), [f"rank {rank}" for rank in range(ranks)])
        axes.set_ylim(ranks - 0.5, -0.5)
    order, line = plan.schedule, plan.timeline
    figure.suptitle(
        f"{_short(plan.problem)}: {order.name}, {order.microbatches} micro-batches, bubble {100 * line.bubble:.1f} %, "
        f"budget {show_bytes(plan.budget)} a rank",
        parse_math=False,
    )
    return figure


def _short(name: str) -> str:
    """Return ``name``, shortened to `LONGEST_NAME` characters if it is longer. Then it ends with an ellipsis."""
    return name if len(name) <= LONGEST_NAME else name[: LONGEST_NAME - 1] + "…"


def draw_timeline(axes: Axes, line: Timeline) -> None:
    """Draw each rank's actions over time into ``axes``, one row per rank, later stages of a rank lighter."""
    scale, unit = next(((s, u) for s, u in ((1e6, "s"), (1e3, "ms")) if line.makespan >= s), (1.0, "µs"))
    present = {span.action.kind for row in line.rows for span in row}
    for rank, row in enumerate(line.rows):
        stages = line.schedule.stage_of_rank[rank]
        for kind in (k for k in KINDS if k in present):
            for nth, stage in enumerate(stages):
                spans = [s for s in row if s.action.kind == kind and s.action.stage == stage]
                bars = [(s.start / scale, (s.end - s.start) / scale) for s in spans]
                shade = 1 - (1 - LIGHT) * nth / max(1, len(stages) - 1)
                style: dict[str, Any] = {"facecolors": KINDS[kind][1], "alpha": shade, "edgecolor": "white"}
                axes.broken_barh(bars, (rank - 0.4, 0.8), linewidth=0.4, **style)
        for span in row:
            if span.end - span.start >= NUMBERED * line.makespan:
                place = (span.start + span.end) / 2 / scale
                axes.text(place, rank, str(span.action.microbatch), ha="center", va="center", fontsize=6)
    axes.set_xlim(0, max(line.makespan, 1e-9) / scale)
    axes.set_xlabel(f"time ({unit})")
    handles = [Patch(color=KINDS[k][1], label=KINDS[k][0]) for k in KINDS if k in present]
    if any(len(stages) > 1 for stages in line.schedule.stage_of_rank):
        handles.append(Patch(color=KINDS["F"][1], alpha=LIGHT, label="lighter: a later stage of the rank"))
    axes.legend(handles=handles, **ABOVE)
