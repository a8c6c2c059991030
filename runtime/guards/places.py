"""Places in which a forward finds values: namespaces that a guard can look up again. A place is the ``__dict__`` of a
module or of a record in its attributes, or a namespace outside the modules."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import reduce
from typing import Any, Protocol

Attributes = Sequence[dict[str, Any]]
"""The ``__dict__`` of each module, each module once, in the order of `ModuleState.attributes`."""
Owner = tuple[int, tuple[str, ...]]
"""The position of a module or record: the position of a module in `Attributes`, and the attribute names that lead
from it to the record (none for the module itself)."""


def record_of(owner: Owner, attributes: Attributes) -> Any:
    """Return the record (an object that exists for its attributes, such as a configuration) at a position in the
    modules' attributes.
    """
    at, (name, *path) = owner
    return reduce(getattr, path, attributes[at][name])


class Place(Protocol):
    """A namespace in which a forward found values, so that a guard can look the values up again."""

    def find(self, attributes: Attributes) -> Any:
        """Return the namespace as it is now, as an object that is indexed by names.

        ``attributes``: the ``__dict__`` of each module, by position.
        """


@dataclass(frozen=True, slots=True)
class Fixed:
    """A namespace that is the same object at every call: the variables of a Python module, a class, the cells of a
    closure.

    ``values``: the namespace.
    """

    values: Any

    def find(self, _attributes: Attributes) -> Any:
        """Return the namespace. ``_attributes`` is not used."""
        return self.values


@dataclass(frozen=True, slots=True)
class Attribute:
    """The ``__dict__`` of a module, or of a record in a module's attributes. A record is an object that exists for its
    attributes, such as a configuration.

    ``owner``: the module's position, and the attributes that lead from it to the record (none for the module itself).
    """

    owner: Owner

    def find(self, attributes: Attributes) -> dict[str, Any]:
        """Return the ``__dict__`` of this place's module or record as it is now.

        ``attributes``: the ``__dict__`` of each module, by position.
        """
        at, path = self.owner
        place = attributes[at]
        for name in path:
            place = place[name].__dict__
        return place


@dataclass(frozen=True, slots=True)
class Buffers:
    """The dictionary in which a module has its buffers. ``at``: the module's position."""

    at: int

    def find(self, attributes: Attributes) -> Any:
        """Return the dictionary. ``attributes``: the ``__dict__`` of each module, by position."""
        return attributes[self.at]["_buffers"]


@dataclass(frozen=True, slots=True)
class Answers:
    """The results of a record's ``__getattr__``, for names that are not attributes of the record. A record is an object
    that exists for its attributes; a configuration, for example, may keep its entries in a dictionary.

    ``owner``: the position of a module, and the attributes that lead from it to the record.
    """

    owner: Owner

    def find(self, attributes: Attributes) -> Asked:
        """Return the record, wrapped so that indexing it by a name reads the attribute of that name.

        ``attributes``: the ``__dict__`` of each module, by position.
        """
        return Asked(record_of(self.owner, attributes))


class Asked:
    """A wrapper of an object: indexing it by a name reads the object's attribute of that name."""

    def __init__(self, holder: Any) -> None:
        self.holder = holder

    def __getitem__(self, name: str) -> Any:
        return getattr(self.holder, name)


class ByName(Mapping[str, Any]):
    """A read-only mapping whose values are looked up by a function at every access. Names for which the function raises
    an AttributeError or ValueError are absent."""

    def __init__(self, names: Iterable[str], get: Callable[[str], Any]) -> None:
        self.names, self.get_named = frozenset(names), get

    def __getitem__(self, name: str) -> Any:
        try:
            return self.get_named(name)
        except (AttributeError, ValueError) as error:
            raise KeyError(name) from error

    def __iter__(self) -> Iterator[str]:
        return (name for name in self.names if name in self)

    def __len__(self) -> int:
        return sum(1 for _ in self)


class AttributesByName(ByName):
    """A read-only mapping whose values are attributes of objects, such as the contents of closure cells.

    ``where``: by name, the object and the name of its attribute. A guard does not use this mapping:
    it reads the attributes from the objects with ``getattr``, called from C.
    """

    def __init__(self, where: Mapping[str, tuple[Any, str]]) -> None:
        super().__init__(where, lambda name: getattr(*where[name]))
        self.where = where


class ClassAttributes(ByName):
    """A read-only mapping of attributes that a class itself has, without those that it inherits. ``home``: the
    class."""

    def __init__(self, home: type, names: Iterable[str]) -> None:
        super().__init__(names, lambda name: vars(home)[name])
        self.home = home


@dataclass(frozen=True)
class Found:
    """The values that a forward found in one place, which is a namespace such as the ``__dict__`` of a module.

    ``place``: the place. ``objects``: by name, the values that were still the same objects after the forward.
    ``copies``: by name, values to which the place had an equal one after the forward, but not the same object; most are
    copies of containers and arrays, whose content may change. ``absent``: names that the forward looked up and that the
    place does not have.
    """

    place: Place
    objects: Mapping[str, Any]
    copies: Mapping[str, Any]
    absent: tuple[str, ...] = ()


@dataclass(frozen=True)
class SharedRecord:
    """A record (an object that exists for its attributes, such as a configuration) that a forward read.

    ``kind``: its class. ``owners``: all positions at which it was found, each as a module's position and a path of
    attribute names. A guard checks that all of them still have one and the same object.
    """

    kind: type
    owners: tuple[Owner, ...]
