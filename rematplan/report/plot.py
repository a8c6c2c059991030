"""The memory/overhead trade-off as a picture."""

from __future__ import annotations

import io
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from matplotlib.axes import Axes
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure

from rematplan.ir import show_bytes
from rematplan.ir.problem_json import write_whole
from rematplan.planner.core.plan import Plan

# Okabe and Ito's palette: told apart by colour-blind readers too. Markers differ as well, for grey prints.
COLOURS = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#E69F00", "#56B4E9", "#000000")
MARKERS = ("o", "s", "^", "D", "v", "P", "X")
_UNDERLAY = "auto"
"""Drawn broad and pale beneath the others, since it runs along the best of them."""


@dataclass(frozen=True, slots=True)
class MeasuredPoint:
    """A plan that was run: its measured peak, and its step time ÷ the no-recompute plan's − 1."""

    peak: int
    overhead: float


def save_trade_off(
    path: Path,
    title: str,
    curves: Mapping[str, Sequence[Plan]],
    base: Plan,
    measured: Sequence[MeasuredPoint] = (),
) -> None:
    """Write the curves as a PNG, whole or not at all.

    ``curves``: by strategy, its plans in any order. ``base``: the no-recompute plan.

    Raises:
        ProblemError: the file cannot be written.
    """
    write_whole(path, trade_off_png(title, curves, base, measured))


def trade_off_png(
    title: str, curves: Mapping[str, Sequence[Plan]], base: Plan, measured: Sequence[MeasuredPoint] = ()
) -> bytes:
    """The picture's bytes: one staircase a strategy, since a plan serves every budget from its peak up."""
    figure = Figure(figsize=(10, 5.6), layout="constrained")
    FigureCanvasAgg(figure)
    axes = figure.add_subplot()
    unit, scale = unit_of(base.estimate.peak)
    strategies = [name for name, plans in curves.items() if plans and name != base.strategy]
    for i, name in enumerate(strategies):
        _staircase(axes, name, curves[name], base.estimate.peak, scale, i)
    if measured:
        axes.plot(
            [m.peak / scale for m in measured],
            [100 * m.overhead for m in measured],
            "x",
            color="black",
            markersize=9,
            markeredgewidth=2,
            label="measured on this machine",
            zorder=5,
        )
    _mark_base(axes, base, unit, scale)
    _mark_smallest(axes, [p for plans in curves.values() for p in plans], base, scale)
    axes.set_title(title, parse_math=False, pad=12)
    axes.set_xlabel(f"peak memory of the training step ({unit})")
    axes.set_ylabel("overhead: extra computing time (%)")
    axes.set_ylim(bottom=min(-1.0, *(100 * m.overhead - 1 for m in measured), 0.0))
    axes.margins(x=0.06, y=0.12)
    axes.grid(alpha=0.3)
    _add_share_axis(axes, max(base.estimate.peak, 1) / scale / 100)
    figure.legend(loc="outside right upper", title="strategy")
    out = io.BytesIO()
    figure.savefig(out, format="png", dpi=130, metadata={"Software": "rematplan"})
    return out.getvalue()


def _add_share_axis(axes: Axes, one_percent: float) -> None:
    """The same axis above, in percent of the no-recompute peak."""

    def to_share(x: Any) -> Any:  # numbers or arrays
        return x / one_percent

    def from_share(percent: Any) -> Any:
        return percent * one_percent

    axes.secondary_xaxis("top", functions=(to_share, from_share)).set_xlabel("% of the no-recompute peak")


def _staircase(axes: Axes, name: str, plans: Sequence[Plan], base_peak: int, scale: int, i: int) -> None:
    points = sorted((p.estimate.peak, 100 * p.estimate.overhead) for p in plans)
    xs = [peak / scale for peak, _ in points]
    ys = [overhead for _, overhead in points]
    if points[-1][0] < base_peak:  # more memory than it needs: it stays as it is
        xs, ys = [*xs, base_peak / scale], [*ys, ys[-1]]
    under = name == _UNDERLAY
    axes.plot(
        xs,
        ys,
        drawstyle="steps-post",
        label=name,
        color="#BBBBBB" if under else COLOURS[i % len(COLOURS)],
        linewidth=8 if under else max(1.2, 4 - 0.8 * i),  # later lines finer, so that none hides another
        marker="o" if under else MARKERS[i % len(MARKERS)],
        markersize=6 if under else max(3.5, 7 - i),
        markerfacecolor="#555555" if under else None,
        markeredgecolor="#555555" if under else None,
        markevery=range(len(points)),
        zorder=1 if under else 3,
    )


def _mark_base(axes: Axes, base: Plan, unit: str, scale: int) -> None:
    x = base.estimate.peak / scale
    axes.plot([x], [100 * base.estimate.overhead], "*", color="black", markersize=15, zorder=6)
    axes.annotate(
        f"no recompute\n{x:.4g} {unit}",
        (x, 100 * base.estimate.overhead),
        xytext=(-8, 26),
        textcoords="offset points",
        ha="right",
        arrowprops={"arrowstyle": "-", "color": "black"},
        zorder=7,
    )


def _mark_smallest(axes: Axes, plans: Sequence[Plan], base: Plan, scale: int) -> None:
    least = min(plans, key=lambda p: (p.estimate.peak, p.estimate.cost), default=base)
    if least.estimate.peak >= base.estimate.peak:
        return
    x, y = least.estimate.peak / scale, 100 * least.estimate.overhead
    share = 100 * least.estimate.peak / base.estimate.peak
    axes.axvline(x, color="black", linestyle=":", linewidth=1, zorder=2)
    axes.plot([x], [y], "o", markersize=13, markerfacecolor="none", markeredgecolor="black", zorder=6)
    axes.annotate(
        f"smallest reachable: {show_bytes(least.estimate.peak)} ({share:.0f} %)\n"
        f"overhead {y:.1f} %, by {least.strategy}",
        (x, y),
        # Below the curves, which fall from the upper left to the lower right, there is room.
        xytext=(0.03, 0.06),
        textcoords="axes fraction",
        va="bottom",
        bbox={"boxstyle": "round", "facecolor": "white", "edgecolor": "#BBBBBB", "alpha": 0.9},
        arrowprops={"arrowstyle": "-", "color": "black", "relpos": (0, 1), "shrinkB": 7},
        zorder=7,
    )


def unit_of(n: int) -> tuple[str, int]:
    """The unit in which a number of bytes is shown, and its size."""
    return next(
        (unit, size)
        for unit, size in (("GiB", 2**30), ("MiB", 2**20), ("KiB", 2**10), ("B", 1))
        if n >= size or size == 1
    )
