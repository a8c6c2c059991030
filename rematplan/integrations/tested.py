"""Warn of versions of a library with which its integration was not tested."""

from __future__ import annotations

from functools import cache
from importlib.metadata import version

from rematplan.runtime.graph.warn import warn


@cache  # one warning, although each trainer asks
def warn_if_untested(library: str, tested: tuple[str, ...]) -> None:
    """Warn, once in a process, if a library's installed version is none of ``tested``, which has first two numbers,
    such as ``5.24``."""
    installed = version(library)
    if ".".join(installed.split(".")[:2]) not in tested:
        warn(f"rematplan was not tested with {library} {installed} (tested: {', '.join(tested)})")
