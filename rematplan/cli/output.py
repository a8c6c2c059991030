"""The output of commands: tables for people, or one JSON document for programs, and a progress bar."""

from __future__ import annotations

import json
import math
import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from typing import Any

from rich.console import Console, RenderableType

from rematplan.cli.remembered_interrupt import stop_if_pressed
from rematplan.planner.core.strategy import Progress, silent
from rematplan.plans.progress import progress_bar

PLAIN_WIDTH = 120
"""The number of columns if standard output is no terminal."""
VERIFICATION_FAILED = 1
"""The exit status if results differ from those that a command compares them with."""


@dataclass(frozen=True)
class Output:
    """Prints what a command outputs. ``json``: print one JSON document on standard output instead of tables. ``quiet``:
    print no tables and no progress bar."""

    json: bool = False
    quiet: bool = False

    def show(self, *views: RenderableType) -> None:
        """Print tables or lines, unless ``json`` or ``quiet`` is set. KeyboardInterrupt after Ctrl-C."""
        stop_if_pressed()
        if self.json or self.quiet:
            return
        # Names come from files: text in them must not be read as markup or emoji codes.
        console = Console(
            markup=False, emoji=False, highlight=False, width=None if sys.stdout.isatty() else PLAIN_WIDTH
        )
        for view in views:
            console.print(view, soft_wrap=isinstance(view, str))  # a line of text stays one line

    def data(self, document: dict[str, Any]) -> None:
        """Print the JSON document of a command, if ``json`` is set. Infinities and NaN are printed as null, paths
        as text."""
        if self.json:
            print(json.dumps(_finite(document), indent=2, allow_nan=False, default=os.fspath))

    @contextmanager
    def progress(self, title: str) -> Iterator[Progress]:
        """Show a progress bar unless ``quiet`` is set. Yields its function of the fraction done and a text. That
        function, and the end of the context, raise KeyboardInterrupt if Ctrl-C was pressed."""
        with nullcontext(silent) if self.quiet else progress_bar(title) as update:

            def updated(done: float, text: str) -> None:
                stop_if_pressed()
                update(done, text)

            yield updated
            stop_if_pressed()


def _finite(value: Any) -> Any:
    """Return the value with infinities and NaN replaced by null, since JSON has neither."""
    if isinstance(value, dict):
        return {k: _finite(v) for k, v in value.items()}
    if isinstance(value, (list, tuple)):
        return [_finite(v) for v in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value
