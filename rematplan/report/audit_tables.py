"""What ``rematplan audit`` shows: the faults, and peak and time of the step in each form."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

from rich.table import Table

from rematplan.ir import show_bytes
from rematplan.plan_report.labels import show_seconds
from rematplan.report.tables import figures_table

if TYPE_CHECKING:
    from rematplan.auditing.audit import Audit
    from rematplan.auditing.faults import Fault

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
