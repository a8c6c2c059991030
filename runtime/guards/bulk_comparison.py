"""Comparison of many values with their earlier values in few calls.

A forward reads hundreds of attributes and nearly always finds the same objects as before. A table fetches the present
values and compares them by identity in a few calls that loop in C. Python code looks only at the objects that differ.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from operator import getitem, is_, itemgetter
from typing import Any

from rematplan.runtime.guards.snapshots import same


def picked(keys: Sequence[Any]) -> Callable[[Any], tuple[Any, ...]]:
    """Return a function that takes a container and returns its items at ``keys`` (keys or positions), as a tuple."""
    if len(keys) > 1:
        return itemgetter(*keys)
    return lambda container: tuple(container[key] for key in keys)


class Table:
    """Values that were found by name in several places (namespaces, such as the ``__dict__`` of a module), to be
    compared with the values that are there later.

    Args:
        rows: for each place, its position in the list of places that `holds` gets, and the values found in it by name.
    """

    def __init__(self, rows: Iterable[tuple[int, Mapping[str, Any]]]) -> None:
        cells = [(at, name, value) for at, values in rows for name, value in values.items()]
        self.places = picked([at for at, _, _ in cells])
        self.names = [name for _, name, _ in cells]
        self.values = [value for _, _, value in cells]

    def holds(self, places: Sequence[Any]) -> bool:
        """Return whether all places still have the values of this table: the same objects, or values that
        `snapshots.same` finds equal.

        Args:
            places: the list of all places (namespaces), each indexed by name.

        Raises:
            LookupError, AttributeError, RuntimeError, ValueError: a place no longer has a value of that name.
        """
        found = list(map(getitem, self.places(places), self.names))
        return all(map(is_, found, self.values)) or all(
            same(now, then) for now, then in zip(found, self.values, strict=True) if now is not then
        )
