"""Keep, where a trace restores Python state, what modules that it imports add to registries outside of them."""

from __future__ import annotations

import importlib._bootstrap
import sys
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from threading import get_ident
from typing import Any
from unittest.mock import patch

from rematplan.runtime.guards.containers import add, added, content, unchanged_content


@contextmanager
def imports_kept(contents: Mapping[int, tuple[Any, Any]]) -> Iterator[None]:
    """Add to earlier contents of containers, inside the block, what imports in this thread add to the containers. A
    module is imported once, so what it registered would be missing in the next run. ``contents``: by id, containers
    with copies of their content, which this changes."""
    thread, importing, own = get_ident(), False, _of_bootstrap("_find_and_load")

    def loaded(name: str, *further: Any) -> Any:
        nonlocal importing
        if importing or name in sys.modules or get_ident() != thread:
            return own(name, *further)
        before = [(container, was, content(container)) for container, was in contents.values()]
        importing = True
        try:
            return own(name, *further)
        finally:
            importing = False
            for container, was, then in before:
                if was is not None and not unchanged_content(container, then):
                    add(was, added(container, then) or ())

    with patch.object(importlib._bootstrap, "_find_and_load", loaded):
        yield


def _of_bootstrap(name: str) -> Callable[..., Any]:
    found: Callable[..., Any] = getattr(importlib._bootstrap, name)
    return found
