"""A diagram of the overhead and the peak of plans for a range of sizes of one dimension, such as the batch."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from matplotlib.figure import Figure

from rematplan.ir import show_bytes
from rematplan.plan_report.labels import unit_of
from rematplan.plans.range_planning import RangePlan
from rematplan.report.plot import COLOURS, MARKERS, save_png


def save_range(path: Path, title: str, plans: Sequence[RangePlan]) -> None:
    """Draw overhead and predicted peak against a size to a PNG file, completely or not at all, a line per budget."""
    figure = Figure(figsize=(11, 4.6), layout="constrained")
    times, peaks = figure.subplots(1, 2)
    rows = plans[0].proof.rows
    unit, scale = unit_of(max(row.base_peak for row in rows))
    for k, plan in enumerate(plans):
        # Sizes at which no plan fits have no point.
        fitting = [row for row in plan.proof.rows if row.fits]
        style = {"color": COLOURS[k % len(COLOURS)], "marker": MARKERS[k % len(MARKERS)], "markersize": 2.5}
        label, sizes = show_bytes(plan.proof.budget), [row.size for row in fitting]
        times.plot(sizes, [100 * row.estimate.overhead for row in fitting], label=label, **style)
        peaks.plot(sizes, [row.estimate.peak / scale for row in fitting], label=label, **style)
    (without,) = peaks.plot(
        [r.size for r in rows], [r.base_peak / scale for r in rows], "--", color="black", linewidth=0.8
    )
    peaks.legend([without], ["without recomputation"], fontsize=8)
    times.set_ylabel("overhead: extra computing time (%)")
    peaks.set_ylabel(f"predicted peak ({unit})")
    for axes in (times, peaks):
        axes.set_xlabel(plans[0].dimension, parse_math=False)
        axes.set_ylim(bottom=0)
    times.legend(title="budget", fontsize=8)
    figure.suptitle(title, parse_math=False)
    save_png(figure, path)
