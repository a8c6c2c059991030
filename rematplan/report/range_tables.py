"""A table of the plans for a range of sizes of one dimension, and the choice of the sizes that it shows."""

from __future__ import annotations

from collections.abc import Sequence

from rich.table import Table

from rematplan.ir import show_bytes
from rematplan.plan_report.labels import show_share
from rematplan.planner.family.range_proof import RangeRow
from rematplan.plans.range_planning import RangePlan
from rematplan.plans.tradeoff import spread_places
from rematplan.report.tables import figures_table

ROWS = 12
"""The number of evenly spread sizes that a table shows."""


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
    """Return, ascending, about `ROWS` evenly spread positions, and neighbours of which one fits and one does not."""
    edges = {k + d for k in range(len(rows) - 1) for d in (0, 1) if rows[k].fits is not rows[k + 1].fits}
    return sorted({*spread_places(len(rows), ROWS), *edges})
