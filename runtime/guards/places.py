"""Where a forward finds values: attributes of modules, of records that these hold, and of what lies outside of them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import reduce
from typing import Any, Protocol

Attributes = Sequence[dict[str, Any]]
"""The attributes of all modules, each module once, in the order of the walk over them."""
Owner = tuple[int, tuple[str, ...]]
"""Who has an attribute: a module, by its position in the walk over all of them, or a record that it holds, such as a
configuration, by the attributes that lead to it."""


def record_of(owner: Owner, attributes: Attributes) -> Any:
    """The record that is an owner.

    Raises:
        LookupError, AttributeError: there is none.
    """
    at, (name, *path) = owner
    return reduce(getattr, path, attributes[at][name])


class Place(Protocol):
    """Where values have names."""

    def find(self, attributes: Attributes) -> Any:
        """What is indexed by the names.

        Raises:
            LookupError, AttributeError: the place is gone.
        """


@dataclass(frozen=True, slots=True)
class Fixed:
    """A place that is always the same: the variables of a module of Python's, a class, the cells of a closure."""

    values: Any

    def find(self, _attributes: Attributes) -> Any:
        """The values by name."""
        return self.values


@dataclass(frozen=True, slots=True)
class Attribute:
    """The attributes of an owner, in its dictionary."""

    owner: Owner

    def find(self, attributes: Attributes) -> dict[str, Any]:
        """The dictionary."""
        at, path = self.owner
        place = attributes[at]
        for name in path:
            place = place[name].__dict__
        return place


@dataclass(frozen=True, slots=True)
class Answers:
    """What a record's ``__getattr__`` says where it is asked for names that are no attributes: of a configuration that
    keeps its entries in a dictionary of its own, say."""

    owner: Owner

    def find(self, attributes: Attributes) -> Asked:
        """The record, by whose index it is asked."""
        return Asked(record_of(self.owner, attributes))


class Asked:
    """An object's attributes by name, for whoever indexes."""

    def __init__(self, holder: Any) -> None:
        self.holder = holder

    def __getitem__(self, name: str) -> Any:
        return getattr(self.holder, name)


@dataclass(frozen=True)
class Found:
    """What a forward found in one place.

    ``objects``: by name, values that are there as they were found. ``copies``: copies of those whose content may
    change. ``absent``: names that it found nothing of.
    """

    place: Place
    objects: Mapping[str, Any]
    copies: Mapping[str, Any]
    absent: tuple[str, ...] = ()


@dataclass(frozen=True)
class SharedRecord:
    """A record that a forward came upon: its class, and all owners that are this one."""

    kind: type
    owners: tuple[Owner, ...]
