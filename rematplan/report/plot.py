"""A diagram of the overhead of plans against their peak memory."""

from __future__ import annotations

import io
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from matplotlib.axes import Axes
from matplotlib.figure import Figure

from rematplan.ir import show_bytes
from rematplan.ir.files import write_whole
from rematplan.plan_report.labels import unit_of
from rematplan.planner.core.plan import Plan, by_peak
from rematplan.plans.range_planning import RangePlan

# Okabe and Ito's palette: colour-blind readers can tell its colours apart. Markers differ as well, for grey prints.
COLOURS = ("#D55E00", "#009E73", "#CC79A7", "#E69F00", "#56B4E9", "#999999", "#F0E442")
MARKERS = ("s", "^", "D", "v", "P", "X", "<")
TOP, TOP_COLOUR = "auto", "#0072B2"
"""The strategy that is drawn on top of all others, and its colour."""
ROOM = 1.25
"""The height of the cut vertical axis ÷ the height of the points that it must show."""
WORTH_CUTTING = 1.6
"""The vertical axis is cut if the highest point is at least this many times higher than the cut axis."""


@dataclass(frozen=True, slots=True)
class MeasuredPoint:
    """The measured peak and overhead of a plan. In each round the overhead is its time ÷ that without
    recomputation, − 1."""

    peak: int
    """The measured peak in bytes."""
    least: float
    """The least overhead of all rounds."""
    overhead: float
    """The median overhead."""
    largest: float
    """The largest overhead."""


@dataclass(frozen=True, slots=True)
class Floors:
    """Lower bounds that are proven for every schedule of a problem."""

    peak: int = 0
    """The lower bound of the peak, in bytes; 0 if none is known."""
    overheads: tuple[tuple[int, float], ...] = ()
    """Pairs (budget in bytes, least overhead); infinite if no schedule fits."""


def save_trade_off(
    path: Path,
    title: str,
    curves: Mapping[str, Sequence[Plan]],
    base: Plan,
    measured: Sequence[MeasuredPoint] = (),
    floors: Floors = Floors(),
) -> None:
    """Write a diagram of the overhead of plans against their peak to a PNG file, completely or not at all."""
    figure = Figure(figsize=(11, 5.6), layout="constrained")
    grid = figure.add_gridspec(2, 2, width_ratios=(3.4, 1), height_ratios=(1.5, 1))
    axes, side = figure.add_subplot(grid[:, 0]), figure.add_subplot(grid[0, 1])
    picture = _Picture(curves, base, measured, floors)
    picture.draw(axes)
    axes.set_title(title, parse_math=False, pad=12)
    axes.set_xlabel(f"peak memory of the training step ({picture.unit})")
    axes.set_ylabel("overhead: extra computing time (%)")
    _add_share_axis(axes, max(base.estimate.peak, 1) / picture.scale / 100)
    top, cut = picture.top, picture.cut
    # One small budget would flatten all other plans, so a small panel shows the whole range.
    axes.set_ylim(picture.bottom, cut if top > WORTH_CUTTING * cut else ROOM * top + 0.5)
    if top > WORTH_CUTTING * cut:
        small = figure.add_subplot(grid[1, 1])
        picture.draw(small, size=0.6)
        small.set_ylim(picture.bottom, 1.08 * top)
        small.axhline(cut, color="black", linewidth=0.8, linestyle="--")
        small.set_title("the whole range; dashed: the cut", fontsize=7)
        small.tick_params(labelsize=7)
    side.axis("off")
    handles, labels = axes.get_legend_handles_labels()
    side.legend(handles, labels, loc="upper left", fontsize=8, frameon=False, borderaxespad=0)
    side.text(0, 0, picture.summary(), transform=side.transAxes, fontsize=8, va="bottom", parse_math=False)
    save_png(figure, path)


def save_png(figure: Figure, path: Path) -> None:
    """Write a figure to a PNG file. A failure leaves no partial file."""
    out = io.BytesIO()
    figure.savefig(out, format="png", dpi=130, metadata={"Software": "rematplan"})
    write_whole(path, out.getvalue())


class _Picture:
    """A diagram of overhead (percent) against peak (in ``unit``s of ``scale`` bytes): curves, points and bounds."""

    def __init__(
        self,
        curves: Mapping[str, Sequence[Plan]],
        base: Plan,
        measured: Sequence[MeasuredPoint],
        floors: Floors,
    ) -> None:
        """Find the units and limits of the diagram. ``curves``: plans by strategy, of which empty ones and that of
        ``base`` are not drawn."""
        self.base, self.measured = base, measured
        self.unit, self.scale = unit_of(base.estimate.peak)
        self.right = base.estimate.peak / self.scale
        self.plans = [p for plans in curves.values() for p in plans]
        drawn = {name: plans for name, plans in curves.items() if plans and name != base.strategy}
        self.curves = {
            name: sorted((p.estimate.peak / self.scale, 100 * p.estimate.overhead) for p in plans)
            for name, plans in drawn.items()
        }
        unreachable = [budget for budget, floor in floors.overheads if math.isinf(floor)]
        self.left = max([floors.peak, *unreachable]) / self.scale
        self.floor = _proven(floors, self.plans, self.scale)
        self.top = max(
            [y for points in self.curves.values() for _, y in points] + self._measured_tops(), default=1.0
        )
        self.bottom = min([-0.02 * self.cut, *(100 * m.least - 1 for m in measured)])

    def _measured_tops(self) -> list[float]:
        return [100 * m.largest for m in self.measured]

    @property
    def cut(self) -> float:
        """The overhead in percent at which the vertical axis would be cut, above all measured points."""
        points = [point for curve in self.curves.values() for point in curve]
        if not points:
            return 1.0
        # Each curve's least overhead halfway between the smallest peak and that without recomputation stays
        # visible.
        middle = (min(x for x, _ in points) + self.right) / 2
        shown = [min((y for x, y in curve if x <= middle), default=0.0) for curve in self.curves.values()]
        return ROOM * max(*shown, 2 * min(shown), *self._measured_tops(), 1.0)

    def draw(self, axes: Axes, size: float = 1.0) -> None:
        """Draw all contents into ``axes``. ``size``: a factor for lines and markers."""
        others = [name for name in self.curves if name != TOP]
        for k, name in enumerate(others):
            self._staircase(axes, name, COLOURS[k % len(COLOURS)], MARKERS[k % len(MARKERS)], size)
        if TOP in self.curves:
            self._staircase(axes, TOP, TOP_COLOUR, "o", size)
        self._shade(axes)
        if self.measured:
            middles = [100 * m.overhead for m in self.measured]
            spread = [
                [100 * (m.overhead - m.least) for m in self.measured],
                [100 * (m.largest - m.overhead) for m in self.measured],
            ]
            peaks = [m.peak / self.scale for m in self.measured]
            axes.errorbar(
                peaks,
                middles,
                yerr=spread,
                fmt="x",
                color="black",
                markersize=8 * size,
                capsize=3 * size,
                zorder=6,
                label="measured: median, least to largest",
            )
        base = 100 * self.base.estimate.overhead
        axes.plot(
            [self.right],
            [base],
            "*",
            color="black",
            markersize=13 * size,
            zorder=7,
            label="no recompute",
            clip_on=False,
        )
        axes.margins(x=0.03)
        axes.grid(alpha=0.3)

    def _staircase(self, axes: Axes, name: str, colour: str, marker: str, size: float) -> None:
        """Draw one strategy's curve into ``axes``, as steps up to the right edge, since a plan serves all budgets above
        its peak."""
        points = self.curves[name]
        if points[-1][0] < self.right:  # a plan also serves every budget above its peak
            points = [*points, (self.right, points[-1][1])]
        top = name == TOP
        axes.plot(
            *zip(*points, strict=True),
            drawstyle="steps-post",
            label=name,
            color=colour,
            linewidth=(2.4 if top else 1.3) * size,
            marker=marker,
            markersize=(4.5 if top else 3.5) * size,
            markevery=range(len(self.curves[name])),
            zorder=5 if top else 3,
        )

    def _shade(self, axes: Axes) -> None:
        """Shade the points that no schedule can reach: overheads below the proven lower bound, and peaks below the
        proven least peak."""
        label = "proven to be out of reach"
        if self.left > 0:
            axes.axvspan(0, self.left, color="#CCCCCC", alpha=0.6, linewidth=0, zorder=1, label=label)
            points = [x for curve in self.curves.values() for x, _ in curve]
            low = min([*points, self.left])
            axes.set_xlim(low - 0.03 * (self.right - low), self.right + 0.03 * (self.right - low))
        if self.floor:
            xs = [self.left, *(x for x, _ in self.floor)]
            ys = [self.floor[0][1], *(y for _, y in self.floor)]
            axes.fill_between(
                xs,
                ys,
                step="pre",
                color="#CCCCCC",
                alpha=0.6,
                linewidth=0,
                zorder=1,
                label=None if self.left > 0 else label,
            )

    def summary(self) -> str:
        """Return lines of text for the diagram: the peak without recomputation, the smallest peak of all plans if that
        is smaller, and the proven least peak if one is known."""
        base = self.base.estimate.peak
        lines = [f"no recompute: {show_bytes(base)}"]
        least = min(self.plans, key=by_peak, default=self.base)
        if least.estimate.peak < base:
            share = 100 * least.estimate.peak / base
            lines += [
                f"smallest found: {show_bytes(least.estimate.peak)}",
                f"  ({share:.0f} %), overhead {100 * least.estimate.overhead:.1f} %,",
                f"  by {least.strategy}",
            ]
        if self.left > 0:
            lines += [f"proven least: {self.left:.4g} {self.unit}"]
        return "\n".join(lines)


def _proven(floors: Floors, plans: Sequence[Plan], scale: int) -> list[tuple[float, float]]:
    """Return the largest finite overhead proven for each stated budget or a larger one, as pairs (budget ÷ ``scale``,
    percent), by rising budget."""
    known = [(p.budget, p.lower_bound) for p in plans if p.budget is not None and p.lower_bound is not None]
    found: list[tuple[float, float]] = []
    highest = 0.0
    # A bound for one budget holds for smaller ones.
    for budget, floor in sorted((*floors.overheads, *known), reverse=True):
        if math.isfinite(floor):
            highest = max(highest, 100 * floor)
            found.append((budget / scale, highest))
    return found[::-1]


def _add_share_axis(axes: Axes, one_percent: float) -> None:
    """Add an axis at the top in percent of the peak without recomputation. ``one_percent``: one percent of that peak in
    the unit of the lower axis."""

    def to_share(x: Any) -> Any:  # numbers or arrays
        return x / one_percent

    def from_share(percent: Any) -> Any:
        return percent * one_percent

    axes.secondary_xaxis("top", functions=(to_share, from_share)).set_xlabel("% of the no-recompute peak")


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
