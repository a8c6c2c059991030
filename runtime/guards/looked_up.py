"""Lookups of single keys in a dictionary, such as a table of what was made for each length.

A forward depends on the keys that it looks up, so entries for other keys may change.
"""

from __future__ import annotations

from collections import OrderedDict, defaultdict
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

from rematplan.runtime.guards.places import Attributes, Place
from rematplan.runtime.guards.snapshots import UNSET, kept, same

DICTIONARIES = (dict, OrderedDict, defaultdict)
"""The classes whose lookups are noted; subclasses may look up in other ways."""
PRESENT = object()
"""Stands for any value of a key."""


@dataclass
class Lookups:
    """How a run of a forward uses single keys of a dictionary."""

    was: Mapping[Any, Any]
    """The dictionary's content before the forward."""
    items: dict[Any, Any] = field(default_factory=dict)
    """The keys on which the forward depends, with their values before it; `UNSET` for none, `PRESENT` for any."""
    stored: set[Any] = field(default_factory=set)
    """The keys for which it stores a value."""
    whole: bool = False
    """Whether it uses the dictionary in another way, too, so that it depends on all of the content."""

    def note(self, key: Any, now: Any) -> None:
        """Note that a key is looked up, whose value is ``now`` (`UNSET`: none), unless the forward has set it."""
        if now is self.was.get(key, UNSET):
            self.items.setdefault(key, kept(now))

    def note_without_effect(self, now: Mapping[Any, Any]) -> None:
        """Note the keys for which the forward has stored the value that they had: in another state, it is a change.
        ``now``: the content after the forward."""
        for key in self.stored:
            self.note(key, now.get(key, UNSET))


class LookedUp:
    """Stands for a dictionary where code only looks up single keys in it and stores items, which ``lookups`` notes."""

    __slots__ = ("_lookups", "of")

    def __init__(self, of: Any, lookups: Lookups) -> None:
        self.of, self._lookups = of, lookups

    def __contains__(self, key: Any) -> bool:
        self._note(key)
        return key in self.of

    def __getitem__(self, key: Any) -> Any:
        self._note(key)
        return self.of[key]

    def __setitem__(self, key: Any, value: Any) -> None:
        self._lookups.stored.add(key)
        self.of[key] = value

    def get(self, key: Any, default: Any = None) -> Any:
        """Return the dictionary's value of a key, or the default."""
        self._note(key)
        return self.of.get(key, default)

    def setdefault(self, key: Any, default: Any = None) -> Any:
        """Return the dictionary's value of a key, first set to the default if there is none."""
        self._note(key)
        return self.of.setdefault(key, default)

    def _note(self, key: Any) -> None:
        self._lookups.note(key, self.of.get(key, UNSET))

    # Only code that was not examined calls these.

    def __getattr__(self, name: str) -> Any:
        self._lookups.whole = True
        return getattr(self.of, name)

    def __iter__(self) -> Iterator[Any]:
        self._lookups.whole = True
        return iter(self.of)

    def __len__(self) -> int:
        self._lookups.whole = True
        return len(self.of)


@dataclass(frozen=True, slots=True)
class KnownItems:
    """A check of a dictionary in which the forward looks up single keys. ``items``: these keys with their values before
    the forward, `UNSET` for none, and `PRESENT` for one that the forward replaces: a missing key would come last."""

    place: Place
    name: str
    items: Mapping[Any, Any]

    @property
    def has_absent(self) -> bool:
        """Whether the dictionary lacked one of the keys."""
        return any(was is UNSET for was in self.items.values())

    def holds(self, attributes: Attributes) -> bool:
        """Return whether the dictionary has the same values of these keys. ``attributes``: the ``__dict__`` of each
        module, by position."""
        now = self.place.find(attributes)[self.name]
        return type(now) in DICTIONARIES and all(
            (was is PRESENT or same(now[key], was)) if key in now else was is UNSET
            for key, was in self.items.items()
        )
