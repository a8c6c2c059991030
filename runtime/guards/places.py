"""Places in which a forward finds values and a guard looks again: the ``__dict__`` of a module or record, or another
namespace."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import reduce
from typing import Any, TypeAlias

Attributes = Sequence[dict[str, Any]]
"""The ``__dict__`` of each module, each module once, in the order of `ModuleState.attributes`."""
Owner = tuple[int, tuple[str, ...]]
"""The position of a module or record: the position of a module in `Attributes`, and the attribute names that lead
from it to the record (none for the module itself)."""


def record_of(owner: Owner, attributes: Attributes) -> Any:
    """Return the record (an object of attributes, such as a configuration) at a position in modules' attributes."""
    at, (name, *path) = owner
    return reduce(getattr, path, attributes[at][name])


@dataclass(frozen=True, slots=True)
class Fixed:
    """A namespace that is the same object at every call: variables of a Python module, a class, cells of a closure."""

    values: Any
    """The namespace."""

    def find(self, _attributes: Attributes) -> Any:
        """Return the namespace. ``_attributes`` is not used."""
        return self.values


@dataclass(frozen=True, slots=True)
class Attribute:
    """The ``__dict__`` of a module, or of a record in its attributes."""

    owner: Owner
    """The module's position, and the attributes that lead from it to the record."""

    def find(self, attributes: Attributes) -> dict[str, Any]:
        """Return the ``__dict__`` of this place's module or record as it is now. ``attributes``: the ``__dict__`` of
        each module, by position."""
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
    """The results of a record's ``__getattr__``, for names that are not attributes, as of a configuration with a
    dictionary."""

    owner: Owner
    """The position of a module, and the attributes that lead from it to the record."""

    def find(self, attributes: Attributes) -> Any:
        """Return the record, wrapped so that indexing it by a name reads the attribute of that name. ``attributes``:
        the ``__dict__`` of each module, by position."""
        return Asked(record_of(self.owner, attributes))


Place: TypeAlias = Fixed | Attribute | Buffers | Answers
"""A namespace in which a forward found values. Its ``find`` returns it as it is now, indexed by names."""


class Asked:
    """A wrapper of an object: indexing it by a name reads the object's attribute of that name."""

    def __init__(self, holder: Any) -> None:
        self.holder = holder

    def __getitem__(self, name: str) -> Any:
        return getattr(self.holder, name)


class ByName(Mapping[str, Any]):
    """A read-only mapping whose values ``get`` looks up at every access; a name for which it raises AttributeError or
    ValueError is absent. Iteration covers only ``names``."""

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
    """A read-only mapping to attributes of objects, such as the contents of closure cells; guards read them by
    ``getattr`` instead. ``where``: by name, the object and its attribute."""

    def __init__(self, where: Mapping[str, tuple[Any, str]]) -> None:
        super().__init__(where, lambda name: getattr(*where[name]))
        self.where = where


class ClassAttributes(ByName):
    """A read-only mapping of a class's own attributes, without those it inherits. ``home``: the class."""

    def __init__(self, home: type, names: Iterable[str]) -> None:
        super().__init__(names, lambda name: vars(home)[name])
        self.home = home


@dataclass(frozen=True)
class Found:
    """The values that a forward found in one place."""

    place: Place
    """The place, a namespace such as the ``__dict__`` of a module."""
    objects: Mapping[str, Any]
    """By name, the values that were still the same objects after the forward."""
    copies: Mapping[str, Any]
    """By name, values that were equal but not the same object after it: most are copies of containers and arrays."""
    absent: tuple[str, ...] = ()
    """Names that the forward looked up and that the place does not have."""


@dataclass(frozen=True)
class SharedRecord:
    """A record that a forward read, at positions which a guard checks to still have one and the same object."""

    kind: type
    """The record's class."""
    owners: tuple[Owner, ...]
    """All positions at which it was found, each as a module's position and a path of attributes."""
