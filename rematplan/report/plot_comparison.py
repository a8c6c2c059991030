"""A diagram that compares plans with and without inverses (ops that compute an input from an output): peak against
extra time, and peak against error."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from matplotlib.axes import Axes
from matplotlib.figure import Figure

from rematplan.plan_report.labels import unit_of
from rematplan.report.plot import COLOURS, MARKERS, TOP_COLOUR, save_png

if TYPE_CHECKING:
    from rematplan.report.comparison_row import Rival

MARKS = {"yes": "", "no": " (does not fit)", "predicted": " (fits as predicted, not as measured)"}
LEAST = 1e-18
"""The value at which an error of 0 is drawn on the logarithmic axis."""


def save_comparison(path: Path, title: str, rivals: Sequence[Rival], budget: int) -> None:
    """Draw each plan's peak against its predicted extra time and its error to a PNG file, completely or not at all.
    Peaks and errors are measured if a plan was run."""
    figure = Figure(figsize=(11, 5.2), layout="constrained")
    times, errors = figure.subplots(1, 2)
    unit, scale = unit_of(max(r.plan.peak for r in rivals))
    for i, rival in enumerate(rivals):
        report, fits = rival.report, rival.fits(budget)
        peak = (report.measured_peak if report else rival.plan.peak) / scale
        error = rival.gradient_error if report else rival.error
        colour = (TOP_COLOUR, *COLOURS)[i % (len(COLOURS) + 1)]
        style: dict[str, Any] = {
            "color": colour,
            "marker": ("o", *MARKERS)[i % (len(MARKERS) + 1)],
            "markerfacecolor": colour if fits == "yes" else "none",
            "linestyle": "",
            "markersize": 9,
            "clip_on": False,
        }
        label = rival.name + MARKS[fits]
        times.plot([peak], [100 * rival.extra], label=label, **style)
        errors.plot([peak], [max(error or 0.0, LEAST)], **style)
    for axes in (times, errors):
        axes.axvline(
            budget / scale,
            color="black",
            linestyle=":",
            linewidth=1.2,
            label="budget" if axes is times else None,
            zorder=1,
        )
    run = any(r.report for r in rivals)
    x = f"{'measured' if run else 'predicted'} peak of the training step ({unit})"
    _name(times, x, "extra computing time, predicted (%)")
    kind = "gradients, measured" if run else "tensors, predicted"
    _name(errors, x, f"relative error of the {kind} ({LEAST:g}: none)")
    errors.set_yscale("log")
    errors.set_ylim(bottom=LEAST / 10)
    figure.suptitle(title, parse_math=False)
    figure.legend(loc="outside lower center", ncols=3)
    save_png(figure, path)


def _name(axes: Axes, x: str, y: str) -> None:
    axes.set_xlabel(x)
    axes.set_ylabel(y)
    axes.margins(0.12)
    axes.grid(alpha=0.3)
