"""Refusal of captures with open sizes in which a model reads a size as text: a symbol has another text."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from threading import get_ident
from typing import Any
from unittest.mock import patch

from rematplan.runtime.symbols.expressions import SYMBOLIC, NotSymbolic

READERS = frozenset({"torch", "sympy", "logging", "warnings"})
"""Packages that may read a symbol's text: what they do with it does not change a graph."""


@contextmanager
def no_size_as_text() -> Iterator[None]:
    """Inside the block and in this thread, raise `NotSymbolic` if code reads a symbolic size as text, except code of
    `READERS` and `OURS`."""
    tracing = get_ident()

    def guarded(original: Any) -> Any:
        def text(size: Any) -> Any:
            """Return the text of a symbolic size. In the tracing thread, `NotSymbolic` is raised unless code of
            `READERS` or `OURS` asks."""
            reader = str(sys._getframe(1).f_globals.get("__name__", ""))
            if (
                get_ident() == tracing
                and reader.partition(".")[0] not in READERS
                and not reader.startswith(OURS)
            ):
                raise NotSymbolic("it reads a size as text")
            return original(size)

        return text

    with ExitStack() as stack:
        for kind in SYMBOLIC:
            stack.enter_context(patch.object(kind, "__repr__", guarded(kind.__repr__)))
        yield


OURS = ("rematplan.ir.", "rematplan.runtime.")
"""Prefixes of modules of this package that run while a model is traced."""
