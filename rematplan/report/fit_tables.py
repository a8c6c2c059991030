"""What ``rematplan fit`` shows: the verdict, the bytes at the peak by kind, and the largest sizes that fit."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

from rich.table import Table

from rematplan.ir import show_bytes
from rematplan.plan_report.labels import LABELS, show_seconds
from rematplan.report.tables import bytes_table, figures_table, pairs_table

if TYPE_CHECKING:
    from rematplan.fitting.fit import Fit
    from rematplan.fitting.sizes import AtSize


def verdict(fit: Fit, max_overhead: float = math.inf) -> str:
    """Return in one line whether a step fits, and the bytes to spare or missing. ``max_overhead``: the largest overhead
    asked for, as a share of the step's time."""
    here, memory = fit.here, show_bytes(fit.memory)
    what = f"{fit.name}, {fit.dimension} {here.size}, in {memory}"
    over = show_bytes(here.without - fit.memory)
    if here.without <= fit.memory:
        return f"fits: {what}: {show_bytes(fit.spare)} to spare, without a plan"
    if here.fits:
        cost = f"+{100 * here.overhead:.1f} % time"
        return f"fits with a plan: {what}: {cost}, {show_bytes(fit.spare)} to spare ({over} too much without)"
    if here.planned <= fit.memory:
        return (
            f"does not fit: {what}: the plan found costs +{100 * here.overhead:.1f} % time, more than "
            f"{100 * max_overhead:g} % ({over} too much without a plan)"
        )
    if here.least > fit.memory:
        return f"does not fit: {what}: it is proven that every plan needs {show_bytes(here.least - fit.memory)} more"
    return f"does not fit: {what}: the smallest plan found needs {show_bytes(-fit.spare)} more"


def split_table(fit: Fit) -> Table:
    """Return a table of the bytes at the peak by kind, without recomputation and with the plan."""
    columns = {
        title: {LABELS.get(kind, kind): n for kind, n in column.items()}
        for title, column in zip(("without a plan", "with a plan"), fit.split.values(), strict=True)
    }
    title = f"{fit.name}: bytes at the peak, {fit.dimension} {fit.here.size}"
    table = bytes_table(title, columns, (fit.here.without, fit.here.planned))
    table.add_row("at", *fit.peak_at.values())
    return table


def margin_table(fit: Fit) -> Table:
    """Return a table of what the margin is for."""
    rows = [(show_bytes(n), why) for why, n in fit.margin.items()]  # two parts may be equally large
    return pairs_table("The margin without a plan", rows)


def largest_table(fit: Fit) -> Table:
    """Return a table of the size in question, the largest that fit, and the fastest: peaks, overhead, proven least,
    step time, samples per second."""
    columns = ("without a plan", "with a plan", "overhead", "proven least", "step", "samples/s")
    table = figures_table(f"Sizes ({fit.dimension})", "", fit.dimension, *columns)
    rows = {"in question": fit.here}
    if fit.largest is not None:
        largest = {
            "largest without a plan": fit.largest.without,
            "largest with a plan": fit.largest.planned,
            "most samples/s": fit.largest.fastest,
        }
        rows |= {name: row for name, row in largest.items() if row is not None}
    for name, row in rows.items():
        table.add_row(name, *_cells(row))
    return table


def _cells(row: AtSize) -> tuple[str, ...]:
    """Return a row of the table of sizes as text; an unknown rate is empty."""
    return (
        str(row.size),
        show_bytes(row.without),
        show_bytes(row.planned),
        f"{100 * row.overhead:.1f} %",
        show_bytes(row.least),
        show_seconds(row.seconds),
        "" if row.rate is None else f"{row.rate:.4g}",
    )


def largest_line(fit: Fit) -> str:
    """Return the largest sizes that fit, and what is proven impossible, in one line."""
    found = fit.largest
    if found is None:
        return f"largest {fit.dimension}: not known"
    parts = [f"{found.without.size} without a plan" if found.without else "none without a plan"]
    if found.planned is None:
        parts.append("none with one")
    elif found.without is None or found.planned.size > found.without.size:
        parts.append(f"{found.planned.size} at +{100 * found.planned.overhead:.1f} %")
    if found.impossible is not None:
        parts.append(f"from {found.impossible} on proven impossible")
    else:
        parts.append(f"{found.tried} is the largest considered")
    return f"largest {fit.dimension}: {', '.join(parts)}"
