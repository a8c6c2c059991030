"""The output of commands: tables for people, or one JSON document for programs, and a progress bar."""

from __future__ import annotations

import json
import math
import sys
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Any

from rich.console import Console, RenderableType

from rematplan.planner.core.strategy import Progress
from rematplan.plans.progress import progress_bar

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

    def progress(self, title: str) -> AbstractContextManager[Progress]:
        """Return a context with a progress bar; see `progress_bar`."""
        return progress_bar(title, not self.quiet)


def _finite(value: Any) -> Any:
    """Return the value with infinities and NaN replaced by null, since JSON has neither."""
    if isinstance(value, dict):
        return {k: _finite(v) for k, v in value.items()}
    if isinstance(value, (list, tuple)):
        return [_finite(v) for v in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value
