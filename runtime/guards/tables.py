"""Values by name in many places, compared all at once.

A forward reads hundreds of attributes, and nearly always finds the very objects that it found before. So they are
fetched and compared by identity in a few calls that loop in C; Python looks only at what is another object now.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from operator import getitem, is_, itemgetter
from typing import Any

from rematplan.runtime.guards.snapshots import same


def picked(keys: Sequence[Any]) -> Callable[[Any], tuple[Any, ...]]:
    """What gets the values of keys, or the items at positions, as a tuple."""
    if len(keys) > 1:
        return itemgetter(*keys)
    return lambda held: tuple(held[key] for key in keys)


class Table:
    """Values that were found in some places.

    ``rows``: of each place its position among all, and the values by name.
    """

    def __init__(self, rows: Iterable[tuple[int, Mapping[str, Any]]]) -> None:
        cells = [(at, name, value) for at, values in rows for name, value in values.items()]
        self.places = picked([at for at, _, _ in cells])
        self.names = [name for _, name, _ in cells]
        self.values = [value for _, _, value in cells]

    def holds(self, places: Sequence[Any]) -> bool:
        """Whether the places have these values still, or the same ones in the sense of `snapshots.same`.

        Raises:
            LookupError, AttributeError, RuntimeError, ValueError: something is gone.
        """
        found = list(map(getitem, self.places(places), self.names))
        return all(map(is_, found, self.values)) or all(
            same(now, then) for now, then in zip(found, self.values, strict=True) if now is not then
        )
