"""The places in which a forward finds values: attributes of modules and of their records, and namespaces
outside the modules."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import reduce
from typing import Any, Protocol

Attributes = Sequence[dict[str, Any]]
"""The ``__dict__`` of each module, each module once, in the order of `ModuleState.attributes`."""
Owner = tuple[int, tuple[str, ...]]
"""A module or a record: the position of a module, and the attribute names that lead from it to the record
(none for the module itself)."""


def record_of(owner: Owner, attributes: Attributes) -> Any:
    """Return the record that an owner denotes.

    Args:
        owner: the position of a module, and the names of the attributes that lead from it to the record.
        attributes: the ``__dict__`` of each module, by position.

    Raises:
        LookupError, AttributeError: the record no longer exists.
    """
    at, (name, *path) = owner
    return reduce(getattr, path, attributes[at][name])


class Place(Protocol):
    """A namespace in which a forward found values."""

    def find(self, attributes: Attributes) -> Any:
        """Return the namespace, which is indexed by names.

        Raises:
            LookupError, AttributeError: it no longer exists.
        """


@dataclass(frozen=True, slots=True)
class Fixed:
    """A namespace that is the same object at every call: the variables of a Python module, a class, the cells
    of a closure."""

    values: Any

    def find(self, _attributes: Attributes) -> Any:
        """Return the namespace."""
        return self.values


@dataclass(frozen=True, slots=True)
class Attribute:
    """The ``__dict__`` of a module or record."""

    owner: Owner

    def find(self, attributes: Attributes) -> dict[str, Any]:
        """Return the ``__dict__``."""
        at, path = self.owner
        place = attributes[at]
        for name in path:
            place = place[name].__dict__
        return place


@dataclass(frozen=True, slots=True)
class Answers:
    """The results of a record's ``__getattr__``, for names that are no attributes (a configuration may keep
    its entries in a dictionary, for example)."""

    owner: Owner

    def find(self, attributes: Attributes) -> Asked:
        """Return the record, wrapped so that indexing it reads attributes."""
        return Asked(record_of(self.owner, attributes))


class Asked:
    """A wrapper that reads an object's attributes by indexing."""

    def __init__(self, holder: Any) -> None:
        self.holder = holder

    def __getitem__(self, name: str) -> Any:
        return getattr(self.holder, name)


@dataclass(frozen=True)
class Found:
    """What a forward found in one place.

    ``objects``: by name, values that are compared by identity first. ``copies``: by name, copies of values
    whose content may change. ``absent``: names that the forward looked up in vain.
    """

    place: Place
    objects: Mapping[str, Any]
    copies: Mapping[str, Any]
    absent: tuple[str, ...] = ()


@dataclass(frozen=True)
class SharedRecord:
    """A record that a forward read: its class, and all owners under which it is found."""

    kind: type
    owners: tuple[Owner, ...]
