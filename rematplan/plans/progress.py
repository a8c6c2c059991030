"""Show the user how planning proceeds: lines of the logger ``rematplan``, and a progress bar on a terminal."""

from __future__ import annotations

import logging
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING

from rematplan.planner.core.plan import Plan
from rematplan.planner.core.strategy import Progress, silent

if TYPE_CHECKING:
    from rematplan.runtime.graph.captured_step import CapturedStep

LOG = logging.getLogger("rematplan")


@contextmanager
def progress_bar(title: str) -> Iterator[Progress]:
    """Show a progress bar on standard error if that is a terminal, else nothing. Yields a function of the fraction done
    (0 to 1) and a text."""
    if not sys.stderr.isatty():
        yield silent
        return
    from rich.console import Console
    from rich.progress import BarColumn, SpinnerColumn, TextColumn, TimeElapsedColumn
    from rich.progress import Progress as Bar

    columns = (
        SpinnerColumn(),
        TextColumn("{task.description}", markup=False),
        BarColumn(),
        TextColumn("{task.percentage:3.0f} %"),
        TimeElapsedColumn(),
    )
    with Bar(*columns, console=Console(stderr=True), transient=True) as bar:
        task = bar.add_task(title, total=1.0)

        def report(fraction: float, text: str) -> None:
            bar.update(task, completed=fraction, description=f"{title}: {text}" if text else title)

        yield report


def log_plan(step: CapturedStep, plan: Plan, costs: float, search: float) -> None:
    """Log a plan at level INFO, with the types and shapes of the step's batch and the time that planning took."""
    LOG.info("%s; for %s; costs %.1f s, search %.1f s", plan, shapes_of(step), costs, search)


def shapes_of(step: CapturedStep) -> str:
    """Return the types and shapes of a step's batch as text, such as ``float32[8, 3], int64[8]``; ``no tensors`` if it
    has none."""
    batch = (step.values[i.value].fake for i in step.inputs if i.kind == "batch")
    return ", ".join(f"{str(t.dtype).removeprefix('torch.')}{list(t.shape)}" for t in batch) or "no tensors"
