"""Keep, recompute or invert, as a picture: peak against extra time and against the error of the gradients."""

from __future__ import annotations

import io
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from matplotlib.axes import Axes
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure

from rematplan.ir.problem_json import write_whole
from rematplan.report.plot import COLOURS, MARKERS, unit_of

if TYPE_CHECKING:
    from rematplan.report.rival import Rival

LEAST = 1e-18
"""Where an error of 0 is drawn."""


def save_comparison(path: Path, title: str, rivals: Sequence[Rival]) -> None:
    """Write the picture as a PNG, whole or not at all.

    Raises:
        ProblemError: the file cannot be written.
    """
    figure = Figure(figsize=(11, 4.8), layout="constrained")
    FigureCanvasAgg(figure)
    times, errors = figure.subplots(1, 2)
    unit, scale = unit_of(max(r.plan.peak for r in rivals))
    for i, rival in enumerate(rivals):
        report = rival.report
        peak = (report.measured_peak if report else rival.plan.peak) / scale
        error = rival.gradient_error if report else rival.error
        style = {"color": COLOURS[i % len(COLOURS)], "marker": MARKERS[i % len(MARKERS)]}
        times.plot([peak], [100 * rival.extra], linestyle="", markersize=9, label=rival.name, **style)
        errors.plot([peak], [max(error or 0.0, LEAST)], linestyle="", markersize=9, **style)
    _name(times, f"peak memory of the training step ({unit})", "extra computing time, predicted (%)")
    _name(
        errors,
        f"peak memory of the training step ({unit})",
        f"relative error of the gradients ({LEAST:g}: none)",
    )
    errors.set_yscale("log")
    figure.suptitle(title, parse_math=False)
    figure.legend(loc="outside lower center", ncols=3)
    out = io.BytesIO()
    figure.savefig(out, format="png", dpi=130, metadata={"Software": "rematplan"})
    write_whole(path, out.getvalue())


def _name(axes: Axes, x: str, y: str) -> None:
    axes.set_xlabel(x)
    axes.set_ylabel(y)
    axes.margins(0.12)
    axes.grid(alpha=0.3)
