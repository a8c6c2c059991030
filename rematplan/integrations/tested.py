"""Warn of versions of a library with which its integration was not tested."""

from __future__ import annotations

from importlib.metadata import version

from rematplan.runtime.graph.warn import warn


def warn_if_untested(library: str, tested: tuple[str, ...]) -> None:
    """Warn if the installed version of a library is none of those with which the integration was tested.

    ``tested``: the first two numbers of each tested version, such as ``5.24``.
    """
    installed = version(library)
    if ".".join(installed.split(".")[:2]) not in tested:
        warn(f"rematplan was not tested with {library} {installed} (tested: {', '.join(tested)})")
