"""The guard of a captured forward: it checks, in few calls, whether everything that the forward read still has the same
value."""

from __future__ import annotations

import copy
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import repeat
from operator import contains, getitem, is_
from typing import Any

import torch

from rematplan.runtime.guards.bulk_comparison import Table, picked
from rematplan.runtime.guards.module_state import ModuleState
from rematplan.runtime.guards.places import (
    Attribute,
    Attributes,
    Fixed,
    Found,
    Owner,
    Place,
    SharedRecord,
    record_of,
)
from rematplan.runtime.guards.value_guard import ValueGuard

_GONE = (LookupError, AttributeError, RuntimeError, ValueError)
"""Exceptions raised by the lookup of a value that no longer exists."""


class Guard:
    """A check that tracing a forward again would give the same graph, because everything that the forward read still
    has the same value.

    It covers attributes, values outside of the modules, and values of inputs and buffers that decided the control flow.
    Arguments and module states are covered by `call_key` and `ModuleState` instead.

    Args:
        modules: the number of modules.
        found: the values that the forward read, one `Found` for each place (a namespace).
        shared: the records (objects that exist for their attributes, such as a configuration) that the forward read,
            each with all positions that must still have the same object.
        decided: the check of control-flow decisions that depended on values of inputs and buffers.
    """

    def __init__(
        self, modules: int, found: Sequence[Found], shared: Sequence[SharedRecord], decided: ValueGuard
    ) -> None:
        self.fixed: list[Any] = []
        self.others: list[Place] = []
        ordered = sorted(found, key=lambda f: not isinstance(f.place, Fixed))
        rows = [(self._position(f.place, modules), f) for f in ordered]
        self.objects = Table([(at, f.objects) for at, f in rows])
        self.copies = Table([(at, f.copies) for at, f in rows])
        absent = [(at, name) for at, f in rows for name in f.absent]
        self.without, self.absent = picked([at for at, _ in absent]), [name for _, name in absent]
        self.shared = [_Shared.of(record) for record in shared]
        self.decided = decided

    def mapped(self, change: Callable[[Any], Any]) -> Guard:
        """Return a copy of this guard for other sizes. Only the recorded calls change, which compute the values that
        decided the control flow from inputs and buffers.

        Args:
            change: a function from the nested arguments of a recorded call to the arguments with other sizes.
        """
        other = copy.copy(self)
        other.decided = self.decided.mapped(change)
        return other

    def _position(self, place: Place, modules: int) -> int:
        """Return the position of a namespace in the list that `holds_for` makes. The list has the ``__dict__`` of each
        module, then the namespaces that are always the same objects, then those that must be looked up. A namespace of
        the second or third kind is added to `fixed` or `others`.

        Args:
            place: the namespace.
            modules: the number of modules.
        """
        if isinstance(place, Attribute) and not place.owner[1]:
            return place.owner[0]
        if isinstance(place, Fixed):
            self.fixed.append(place.values)
        else:
            self.others.append(place)
        return modules + len(self.fixed) + len(self.others) - 1

    def holds(self, state: ModuleState, tensors: Sequence[torch.Tensor]) -> bool:
        """Return whether tracing the forward again now would give the same graph.

        Args:
            state: the module's present state.
            tensors: the tensors among the arguments.
        """
        return self.holds_for(state) and self.decided.holds(state.named, tensors)

    def holds_for(self, state: ModuleState) -> bool:
        """Return whether everything that the forward read still has the same value, except values of inputs and
        buffers, which are not compared.

        Args:
            state: the module's present state.
        """
        attributes = state.attributes
        try:
            places = [*attributes, *self.fixed, *[place.find(attributes) for place in self.others]]
            return (
                self.objects.holds(places)
                and self.copies.holds(places)
                and not any(map(contains, self.without(places), self.absent))
                and all(record.holds(attributes) for record in self.shared)
            )
        except _GONE:
            return False


@dataclass(frozen=True, slots=True)
class _Shared:
    """A check that all positions at which a forward found a record (an object that exists for its attributes, such as a
    configuration) still have one and the same object.

    ``kind``: the record's class. ``first``: one of the positions. ``modules``, ``names``: of the further positions that
    are attributes of modules, the module's position and the attribute's name. ``deeper``: the further positions that
    are attributes of other records.
    """

    kind: type
    first: Owner
    modules: tuple[int, ...]
    names: tuple[str, ...]
    deeper: tuple[Owner, ...]

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
