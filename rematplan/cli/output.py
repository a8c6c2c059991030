"""What a command says: tables for a person, or one JSON document for a program; progress while they wait."""

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
"""Columns where standard output is no terminal."""


@dataclass(frozen=True)
class Output:
    """``json``: one document on standard output and no tables. ``quiet``: no tables and no progress."""

    json: bool = False
    quiet: bool = False

    def show(self, *views: RenderableType) -> None:
        """Print tables or lines for a person."""
        if self.json or self.quiet:
            return
        # Names come from files: no markup in them, no emoji codes.
        console = Console(
            markup=False, emoji=False, highlight=False, width=None if sys.stdout.isatty() else PLAIN_WIDTH
        )
        for view in views:
            console.print(view)

    def data(self, document: dict[str, Any]) -> None:
        """Print the JSON document, if one is wanted."""
        if self.json:
            print(json.dumps(_finite(document), indent=2, allow_nan=False))

    @contextmanager
    def progress(self, title: str) -> Iterator[ProgressCall]:
        """A progress bar on standard error, if that is a terminal; yields what reports the fraction done."""
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
    """The value without infinities and NaN, which JSON has no words for: they become null."""
    if isinstance(value, dict):
        return {k: _finite(v) for k, v in value.items()}
    if isinstance(value, (list, tuple)):
        return [_finite(v) for v in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value
