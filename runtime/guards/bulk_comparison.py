"""Comparison of many values with earlier ones, by identity, in few calls that loop in C. Python code looks at
objects that differ."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from operator import contains, getitem, is_, itemgetter
from typing import Any, TypeAlias

from rematplan.runtime.guards.snapshots import same

Pick: TypeAlias = Callable[[Any], tuple[Any, ...]]
"""A function that takes a container and returns some of its items."""
_MOST_PICKS = 64


class Namespaces(list[Any]):
    """A list of namespaces that never changes. It remembers what each function has picked from it (`pick`)."""

    def __init__(self, namespaces: Iterable[Any]) -> None:
        super().__init__(namespaces)
        self._picked: dict[Pick, tuple[Any, ...]] = {}

    def pick(self, items: Pick) -> tuple[Any, ...]:
        """Return ``items(self)``, computed once for each function ``items``. All results are forgotten when
        `_MOST_PICKS` functions are remembered."""
        found = self._picked.get(items)
        if found is None:
            if len(self._picked) >= _MOST_PICKS:  # also those of guards that are no longer in use
                self._picked.clear()
            found = self._picked[items] = items(self)
        return found


def picked(keys: Sequence[Any]) -> Pick:
    """Return a function that takes a container and returns its items at ``keys`` (keys or positions), as a tuple."""
    if len(keys) > 1:
        return itemgetter(*keys)
    return lambda container: tuple(container[key] for key in keys)


class Table:
    """What was found by name in several places, such as the ``__dict__`` of modules, to be compared with what is there
    later. ``rows``: each place's position, and its values by name. ``absent``: names that a place must lack. ``fetch``:
    how a name is looked up in a place."""

    def __init__(
        self,
        rows: Iterable[tuple[int, Mapping[str, Any]]],
        absent: Sequence[tuple[int, str]] = (),
        fetch: Callable[[Any, str], Any] = getitem,
    ) -> None:
        self.fetch = fetch
        cells = [(at, name, value) for at, values in rows for name, value in values.items()]
        self.places = picked([at for at, _, _ in cells])
        self.names = [name for _, name, _ in cells]
        self.values = [value for _, _, value in cells]
        self.without, self.absent = picked([at for at, _ in absent]), [name for _, name in absent]

    def holds(self, places: Namespaces) -> bool:
        """Return whether all places have this table's values, the same or by `snapshots.same`, and no absent name. A
        name that a place lacks raises what ``fetch`` raises."""
        return self._holds(places.pick(self.places), places.pick(self.without))

    def holds_once(self, places: Sequence[Any]) -> bool:
        """Return whether ``places``, a list made for this call only, have this table's values, the same or by
        `snapshots.same`, and no absent name."""
        return self._holds(self.places(places), self.without(places))

    def _holds(self, places: Sequence[Any], without: Sequence[Any]) -> bool:
        if any(map(contains, without, self.absent)):
            return False
        found = list(map(self.fetch, places, self.names))
        return all(map(is_, found, self.values)) or all(
            same(now, then) for now, then in zip(found, self.values, strict=True) if now is not then
        )
