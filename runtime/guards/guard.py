"""The guard of a captured forward: it checks, in few calls, whether everything that the forward read still has the same
value."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass
from itertools import repeat
from operator import getitem, is_
from typing import Any

import torch

from rematplan.runtime.guards.bulk_comparison import Namespaces, Table
from rematplan.runtime.guards.counted_numbers import Comparison
from rematplan.runtime.guards.looked_up import KnownItems
from rematplan.runtime.guards.module_state import ModuleState
from rematplan.runtime.guards.places import (
    Attribute,
    Attributes,
    AttributesByName,
    Fixed,
    Found,
    Owner,
    Place,
    SharedRecord,
    record_of,
)
from rematplan.runtime.guards.repeated_writes import IsNone, KnownKeys
from rematplan.runtime.guards.value_guard import ValueGuard

_GONE = (LookupError, AttributeError, RuntimeError, ValueError, TypeError)
"""Exceptions raised by the lookup of a value that no longer exists."""


class Guard:
    """A check that tracing a forward again would give the same graph: all that the forward read has the same value.
    Arguments and module states are covered by `call_key` and `ModuleState` instead."""

    def __init__(
        self,
        found: Sequence[Found],
        shared: Sequence[SharedRecord],
        decided: ValueGuard,
        conditions: Sequence[Comparison | KnownKeys | KnownItems | IsNone] = (),
    ) -> None:
        """Sort what the forward ``found`` into tables that are compared in few calls. ``conditions``: what must hold of
        values that the forward changes in each call, such as counters."""
        modules: list[tuple[int, Found]] = []
        items: list[tuple[Any, Found]] = []
        attributes: list[tuple[Any, Found]] = []
        others: list[tuple[Place, Found]] = []
        for f in found:
            if isinstance(f.place, Attribute) and not f.place.owner[1]:
                modules.append((f.place.owner[0], f))
            elif not isinstance(f.place, Fixed):
                others.append((f.place, f))
            elif isinstance(f.place.values, AttributesByName):
                attributes += _by_object(f.place.values, f)
            else:
                items.append((f.place.values, f))
        self.of_modules = _tables(modules)
        self.items, self.of_items = _numbered(items)
        self.objects, self.of_objects = _numbered(attributes, getattr)
        self.others, self.of_others = _numbered(others)
        self.sequences = {
            (f.place.owner, name): value
            for f in found
            if isinstance(f.place, Attribute)
            for name, value in {**f.objects, **f.copies}.items()
            if isinstance(value, (torch.Tensor, list, tuple))
        }
        self.shared = [_Shared.of(record) for record in shared]
        self.decided, self.conditions = decided, conditions

    def mapped(self, change: Callable[[Any], Any], counts: Sequence[int] | None = None) -> Guard:
        """Return a copy for other sizes: ``change`` is applied to arguments of the recorded calls that compute decisive
        values. ``counts``: the numbers expected as sizes; None leaves them as they are."""
        other = copy.copy(self)
        other.decided = self.decided.mapped(change)
        if counts is not None:
            other.decided = other.decided.with_counts(counts)
        return other

    def holds(
        self, state: ModuleState, tensors: Sequence[torch.Tensor], assumed: tuple[bool, ...] = ()
    ) -> bool:
        """Return whether tracing the forward again now would give the same graph. ``tensors``: the batch. ``assumed``:
        outcomes that the graph must assume of the first tests for infinite and NaN values."""
        decided = self.decided
        return decided.assumes(assumed) and self.holds_for(state) and decided.holds(state.named, tensors)

    def holds_for(self, state: ModuleState) -> bool:
        """Return whether everything that the forward read still exists and has the same value. Values of inputs and
        buffers are not compared."""
        attributes = state.attributes
        try:
            return (
                all(table.holds(attributes) for table in self.of_modules)
                and all(table.holds(self.items) for table in self.of_items)
                and all(table.holds(self.objects) for table in self.of_objects)
                and self._others_hold(attributes)
                and all(record.holds(attributes) for record in self.shared)
                and all(condition.holds(attributes) for condition in self.conditions)
            )
        except _GONE:
            return False

    @property
    def fills(self) -> bool:
        """Whether the forward looked up keys that a dictionary did not have, so that its next call may find them."""
        return any(isinstance(one, KnownItems) and one.has_absent for one in self.conditions)

    def sequences_now(self, state: ModuleState) -> Iterator[tuple[Owner, str, Any, Any]]:
        """Yield the attributes in which the forward found a tensor, list or tuple, if they still exist: where, the
        name, the value that the forward found, and the present one."""
        for (owner, name), then in self.sequences.items():
            with suppress(*_GONE):
                yield owner, name, then, Attribute(owner).find(state.attributes)[name]

    def _others_hold(self, attributes: Attributes) -> bool:
        places = [place.find(attributes) for place in self.others]
        return all(table.holds_once(places) for table in self.of_others)


def _tables(rows: Sequence[tuple[int, Found]], fetch: Callable[[Any, str], Any] = getitem) -> list[Table]:
    """Return the tables that compare what was found in namespaces: objects, absent names, copies of containers."""
    absent = [(at, name) for at, f in rows for name in f.absent]
    objects = Table([(at, f.objects) for at, f in rows], absent, fetch)
    copies = Table([(at, f.copies) for at, f in rows], fetch=fetch)
    return [table for table in (objects, copies) if table.names or table.absent]


def _numbered(
    pairs: Sequence[tuple[Any, Found]], fetch: Callable[[Any, str], Any] = getitem
) -> tuple[Namespaces, list[Table]]:
    """Return the namespaces of the pairs as a list, and the tables, which name them by position, that compare what
    was found."""
    rows = list(enumerate(f for _, f in pairs))
    return Namespaces(namespace for namespace, _ in pairs), _tables(rows, fetch)


def _by_object(namespace: AttributesByName, found: Found) -> Iterator[tuple[Any, Found]]:
    """Yield the objects whose attributes a namespace has, each with one value that was found there."""
    for name, value in found.objects.items():
        holder, attribute = namespace.where[name]
        yield holder, Found(found.place, {attribute: value}, {})
    for name, value in found.copies.items():
        holder, attribute = namespace.where[name]
        yield holder, Found(found.place, {}, {attribute: value})


@dataclass(frozen=True, slots=True)
class _Shared:
    """A check that all positions at which a forward found a record still have one and the same object."""

    kind: type
    """The record's class."""
    first: Owner
    """One of the positions."""
    modules: tuple[int, ...]
    names: tuple[str, ...]
    """With ``modules``: of further positions in modules, the attribute's name and the module's position."""
    deeper: tuple[Owner, ...]
    """The further positions that are attributes of other records."""

    @staticmethod
    def of(record: SharedRecord) -> _Shared:
        first, *others = record.owners
        direct = [(at, path[0]) for at, path in others if len(path) == 1]
        deeper = tuple(owner for owner in others if len(owner[1]) > 1)
        return _Shared(
            record.kind, first, tuple(at for at, _ in direct), tuple(name for _, name in direct), deeper
        )

    def holds(self, attributes: Attributes) -> bool:
        record = record_of(self.first, attributes)
        found = map(getitem, map(attributes.__getitem__, self.modules), self.names)
        return (
            type(record) is self.kind
            and all(map(is_, found, repeat(record)))
            and all(record_of(owner, attributes) is record for owner in self.deeper)
        )
