"""The output of commands: tables for people, or one JSON document for programs, and a progress bar."""

from __future__ import annotations

import json
import math
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

from rich.console import Console, RenderableType
from rich.progress import BarColumn, Progress, SpinnerColumn, TextColumn, TimeElapsedColumn

from rematplan.planner.core.strategy import Progress as ProgressCall
from rematplan.planner.core.strategy import silent

PLAIN_WIDTH = 120
"""The number of columns if standard output is no terminal."""


@dataclass(frozen=True)
class Output:
    """Where a command's output goes.

    ``json``: print one JSON document on standard output, and no tables. ``quiet``: print no tables and no progress
    bar.
    """

    json: bool = False
    quiet: bool = False

    def show(self, *views: RenderableType) -> None:
        """Print tables or lines, unless the output is JSON or quiet."""
        if self.json or self.quiet:
            return
        # Names come from files: text in them must not be read as markup or emoji codes.
        console = Console(
            markup=False, emoji=False, highlight=False, width=None if sys.stdout.isatty() else PLAIN_WIDTH
        )
        for view in views:
            console.print(view)

    def data(self, document: dict[str, Any]) -> None:
        """Print the JSON document, if the output is JSON."""
        if self.json:
            print(json.dumps(_finite(document), indent=2, allow_nan=False))

    @contextmanager
    def progress(self, title: str) -> Iterator[ProgressCall]:
        """Show a progress bar on standard error, if that is a terminal.

        The context yields a function that takes the fraction done and a short text.
        """
        if self.quiet or not sys.stderr.isatty():
            yield silent
            return
        columns = (
            SpinnerColumn(),
            TextColumn("{task.description}", markup=False),
            BarColumn(),
            TextColumn("{task.percentage:3.0f} %"),
            TimeElapsedColumn(),
        )
        with Progress(*columns, console=Console(stderr=True), transient=True) as bar:
            task = bar.add_task(title, total=1.0)

            def report(fraction: float, text: str) -> None:
                bar.update(task, completed=fraction, description=f"{title}: {text}" if text else title)

            yield report


def _finite(value: Any) -> Any:
    """Return the value with infinities and NaN replaced by null, since JSON has neither."""
    if isinstance(value, dict):
        return {k: _finite(v) for k, v in value.items()}
    if isinstance(value, (list, tuple)):
        return [_finite(v) for v in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value
