"""Tables of values by place and name, compared all at once.

A forward reads hundreds of attributes and nearly always finds the same objects as before. A table fetches and
compares them by identity in a few calls that loop in C; Python code looks only at the objects that differ.
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
    """Values by place (a namespace) and name, to be compared with the present values in the same places.

    ``rows``: for each place, its position in the list of all places, and its values by name.
    """

    def __init__(self, rows: Iterable[tuple[int, Mapping[str, Any]]]) -> None:
        cells = [(at, name, value) for at, values in rows for name, value in values.items()]
        self.places = picked([at for at, _, _ in cells])
        self.names = [name for _, name, _ in cells]
        self.values = [value for _, _, value in cells]

    def holds(self, places: Sequence[Any]) -> bool:
        """Return whether all places still have these values, or values that are the same by `snapshots.same`.

        ``places``: the list of all places, each indexed by name.

        Raises:
            LookupError, AttributeError, RuntimeError, ValueError: a value no longer exists.
        """
        found = list(map(getitem, self.places(places), self.names))
        return all(map(is_, found, self.values)) or all(
            same(now, then) for now, then in zip(found, self.values, strict=True) if now is not then
        )
