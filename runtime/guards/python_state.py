"""The Python state that a forward may change: attributes, variables, and the content of containers.

A capture undoes each run's changes, so that the next begins alike. How a run uses the state is recorded.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from types import FrameType, MappingProxyType
from typing import Any

import numpy as np
import torch

from rematplan.ir import ModelError
from rematplan.runtime.guards.attributes import BOOKKEEPING, Reads
from rematplan.runtime.guards.bytecode import is_library
from rematplan.runtime.guards.containers import (
    CONTAINERS,
    containers_in,
    content,
    lists_any,
    refill,
    unchanged_content,
)
from rematplan.runtime.guards.counted_numbers import Counting, Expression, Variable, expression_of, plain
from rematplan.runtime.guards.globals import GlobalReads
from rematplan.runtime.guards.iterators import is_computed, is_iterator, progress, refuse_iterator
from rematplan.runtime.guards.looked_up import DICTIONARIES, LookedUp, Lookups
from rematplan.runtime.guards.namespace import Namespace
from rematplan.runtime.guards.places import Attribute, ClassAttributes, Fixed, Owner
from rematplan.runtime.guards.reachable import reached
from rematplan.runtime.guards.repeated_writes import assign
from rematplan.runtime.guards.snapshots import UNSET
from rematplan.runtime.guards.value_flow import COUNTED, ITEM, KEYED, READ, use_of, uses_of

TENSORS = ("_parameters", "_buffers", "_modules")
"""The attributes of a module that have its tensors and submodules. They are compared separately."""
NUMBERS = (int, float)
"""The types of numbers with which a forward may only count."""
_BY_KEY = frozenset({KEYED, ITEM})
FRESH = "fresh"
"""The use of a container that reads it when nothing of its earlier content is left."""


@dataclass
class PythonState:
    """The Python state of a module before a forward that is traced, and how a run of the forward uses it."""

    reads: Reads
    """The attributes that the forward reads and sets."""
    global_reads: GlobalReads
    """The values outside of the modules."""
    namespaces: list[Namespace] = field(default_factory=list)
    contents: dict[int, tuple[Any, Any]] = field(default_factory=dict)
    """By id, all containers in the namespaces, each with a copy of its content."""
    uses: dict[tuple[Owner, str], list[str]] = field(default_factory=dict)
    keys: dict[tuple[Owner, str], tuple[Any, ...]] = field(default_factory=dict)
    """By attribute that is a dictionary, the keys that it has when it is read first (`FRESH`)."""
    lookups: dict[tuple[int, str], Lookups] = field(default_factory=dict)
    """By namespace and name, the dictionaries in which the forward looks up or stores single keys."""
    counting: Counting = field(default_factory=Counting)
    counted: dict[tuple[int, str], Expression] = field(default_factory=dict)
    """By namespace and name, the numbers that the present run of the forward counts with: what each is now."""
    iterators: dict[tuple[int, str], Any] = field(default_factory=dict)  # by where it is reached from
    progress: list[Any] = field(default_factory=list)  # of each iterator, when the run began
    undone: set[tuple[int, str]] = field(default_factory=set)
    """The names that the forward changed, from its end to the next run. A backward must not read them: a trace has
    restored them."""

    def __post_init__(self) -> None:
        """Copy the state, and the content of containers in it. From now on, ``reads`` reports reads and writes here."""
        for owner, holder, values in self.reads.every_holder():
            uses = None if _is_watched(type(holder)) else self._uses
            self.namespaces.append(Namespace(Attribute(owner), values, {}, owner, uses, id(values)))
        own = {
            id(tensor)
            for namespace in self.namespaces
            for kind in TENSORS[:2]
            for tensor in namespace.values.get(kind, {}).values()
        }
        for namespace in self.namespaces:
            namespace.left_out = {n for n, v in namespace.values.items() if n in TENSORS or lists_any(v, own)}
            namespace.before = {
                name: value for name, value in namespace.values.items() if name not in namespace.left_out
            }
        known = {id(namespace.values) for namespace in self.namespaces}
        for shelf in self.global_reads.shelves.values():
            if id(shelf.values) in known or not shelf.variables:
                continue
            variables: Any = shelf.values
            if isinstance(variables, MappingProxyType):
                variables = ClassAttributes(shelf.holder, shelf.found)
            before = dict.fromkeys(shelf.absent, UNSET) | {name: shelf.values[name] for name in shelf.found}
            uses = self._uses if shelf.named else None
            self.namespaces.append(
                Namespace(Fixed(variables), variables, before, uses=uses, key=id(shelf.values))
            )
        self.places = {n.owner: at for at, n in enumerate(self.namespaces) if n.owner is not None}
        self.known, seen = {namespace.key for namespace in self.namespaces}, set[int]()
        for at, namespace in enumerate(self.namespaces):
            for name, value in namespace.before.items():
                for one in reached(value, seen, self.known):
                    if is_iterator(one):
                        self.iterators.setdefault((at, name), one)
                    else:
                        self.contents[id(one)] = one, content(one)
        self.reads.use, self.reads.store = self.used, self.number_set

    def _uses(self, name: str) -> list[str]:
        return [use for code in self.global_reads.codes for use in uses_of(code, name)]

    def check_iterators(self, watched: bool) -> None:
        """Raise `ModelError` for an iterator reached from a variable, or from an attribute that code names.
        ``watched``: whether reads of attributes are recorded, where possible, so that `used` refuses iterators in these
        instead."""
        for (at, name), iterator in self.iterators.items():
            of_holder = self.namespaces[at].owner is not None
            recorded = watched and of_holder and not self.namespaces[at].uses
            if not recorded and (not of_holder or name in self.global_reads.names):
                refuse_iterator(name, iterator)

    def begin(self, numbers: Iterable[tuple[int, str]]) -> None:
        """Prepare for a run of the forward: restore the state, forget what the last run used, and count ``numbers``,
        which it changed. Where no access is recorded, a counted number takes the number's place, and `LookedUp` that of
        a dictionary in which code only looks up single keys."""
        self.restore()
        self.undone.clear()
        self.uses.clear()
        self.keys.clear()
        self.lookups.clear()
        self.counting = Counting()
        self.counted = {}
        self.progress = [progress(one) for one in self.iterators.values()]
        for at, name in numbers:
            namespace = self.namespaces[at]
            variable = Variable(namespace.place, name)
            self.counted[at, name] = variable
            if namespace.uses:
                number = self.counting.number(namespace.before[name], variable)
                assign(namespace.values, name, number)
        for at, namespace in enumerate(self.namespaces):
            if namespace.uses and self._are_own_variables(namespace.values):
                for name, value in namespace.before.items():
                    uses = {*namespace.uses(name)} if type(value) in DICTIONARIES else ()
                    by_key = KEYED in uses and _BY_KEY.issuperset(uses) and not name.startswith("__")
                    noting = self._looked_up(at, name, value) if by_key else None
                    if noting is not None:
                        assign(namespace.values, name, noting)

    def _are_own_variables(self, values: Any) -> bool:
        """Return whether values are the variables of a Python module, or the attributes of a class, that is the
        user's."""
        if isinstance(values, ClassAttributes):
            return not is_library(values.home.__module__, self.reads.own)
        of_module = type(values) is dict and "__builtins__" in values
        return of_module and not is_library(values.get("__name__"), self.reads.own)

    def undo(self) -> None:
        """Restore the state after a run of the forward, whose backward must not read what changed."""
        self.undone = set(self._changed())
        self.restore()

    def check_backward(self) -> None:
        """Raise `ModelError` if a backward has changed state; the changes of its forward must have been undone before
        it."""
        changed = next(self._changed(), None)
        if changed:
            raise ModelError(
                f"the backward changes {changed[1]} (in a hook or an autograd.Function), which a planned one does not"
            )

    def _changed(self) -> Iterator[tuple[int, str]]:
        """Yield the names whose values or content differ from before the forward."""
        contents = {id(one) for one, was in self.contents.values() if not unchanged_content(one, was)}
        for at, namespace in enumerate(self.namespaces):
            yield from ((at, name) for name in namespace.changed() if name not in BOOKKEEPING)
            for name, value in namespace.before.items() if contents else ():
                if any(id(one) in contents for one in containers_in(value)):
                    yield at, name

    def restore(self) -> None:
        """Restore the state: values of names, and the content of containers, each the same object as before."""
        for at, name in self.lookups:
            namespace = self.namespaces[at]
            if namespace.uses:
                assign(namespace.values, name, namespace.now(name))
        for namespace in self.namespaces:
            namespace.restore()
        for container, was in self.contents.values():
            if not unchanged_content(container, was):
                refill(container, was)

    def used(self, holder: Any, name: str, value: Any, frame: FrameType) -> Any:
        """Record a read of an attribute. Return its ``value``: a counted number if the forward changes the attribute
        and this read only counts, `LookedUp` for a dictionary in which it looks up one key. `ModelError` for an
        iterator, and if a backward reads what the forward changes."""
        kind = type(value)
        for place, found in self.iterators.items():
            if name == place[1] and place == self._at(holder, name):
                refuse_iterator(name, found)
        if self.undone and self._at(holder, name) in self.undone:
            raise ModelError(
                f"the backward reads {name} (in a hook or an autograd.Function), and the forward changes it; read "
                f"it in the forward, and let the backward use that value"
            )
        if kind not in NUMBERS and not isinstance(value, (*CONTAINERS, np.ndarray)):
            if is_iterator(value) and not is_computed(holder, name):
                refuse_iterator(name, value)
            if value is not None and not isinstance(value, torch.Tensor):
                return value
        owner = self.reads.owner_of(holder)
        at = self.places.get(owner) if owner is not None else None
        fresh = self.reads.fresh
        if owner is None or at is None or (owner, name) in fresh or name not in self.namespaces[at].values:
            return value
        use = use_of(frame.f_code, frame.f_lasti, name)
        noting = self._looked_up(at, name, value) if use in _BY_KEY else None
        if use == KEYED and noting is None:
            use = READ
        if kind not in NUMBERS and use == READ:
            use = self._read(at, owner, name, value)
        self.uses.setdefault((owner, name), []).append(use)
        if noting is not None:
            return noting
        if (at, name) not in self.counted:
            return value
        if use == COUNTED:
            return self.counting.number(value, self.counted[at, name])
        self.counting.reveal(self.counted[at, name])
        return value

    def _looked_up(self, at: int, name: str, value: Any) -> LookedUp | None:
        """Return what notes the keys that are looked up in a value; None unless it is a dictionary that was there
        before the forward, also for those in which `nn.Module` keeps hooks."""
        was = self.content_of(value)
        if type(value) not in DICTIONARIES or was is None or name in BOOKKEEPING:
            return None
        return LookedUp(value, self.lookups.setdefault((at, name), Lookups(was)))

    def _at(self, holder: Any, name: str) -> tuple[int | None, str]:
        owner = self.reads.owner_of(holder)
        return (None if owner is None else self.places.get(owner)), name

    def _read(self, at: int, owner: Owner, name: str, value: Any) -> str:
        """Return `FRESH` if an attribute is still its earlier dictionary, list or deque, without any earlier value;
        else `READ`, also for an empty dictionary, and a list or deque that was empty. A dictionary's earlier keys
        must also come first among the keys of its first such read, which `keys` remembers."""
        was = self.content_of(value)
        if was is None or value is not self.namespaces[at].before.get(name, UNSET):
            return READ
        if isinstance(value, dict):
            earlier = {id(v) for v in was.values()}
            if not value or any(id(v) in earlier for v in dict.values(value)):
                return READ
            first = self.keys.setdefault((owner, name), tuple(dict.keys(value)))
            return FRESH if list(was) == list(first[: len(was)]) else READ
        if isinstance(value, (list, deque)) and len(was):
            earlier = {id(v) for v in was}
            return READ if any(id(v) in earlier for v in value) else FRESH
        return READ

    def content_of(self, container: Any) -> Any:
        """Return the content of a container in the namespaces before the forward; None for another container."""
        return self.contents.get(id(container), (None, None))[1]

    def number_set(self, holder: Any, name: str, value: Any) -> Any:
        """Return the plain value to store in an attribute of ``holder``; ``value`` itself if the holder is unknown. If
        the attribute is counted in this run, remember how the value was computed; else reveal the variables in it."""
        owner = self.reads.owner_of(holder)
        if owner is None:
            return value
        at = self.places.get(owner)
        if at is not None and (at, name) in self.counted:
            self.counted[at, name] = expression_of(value)
        else:
            self.counting.reveal(expression_of(value))
        return plain(value)

    def path_of(self, at: int, name: str) -> tuple[int | None, str]:
        """Return the position of the module that has a name of namespace ``at``, None for a variable outside, and the
        path of attributes to the name."""
        owner = self.namespaces[at].owner
        return (None, name) if owner is None else (owner[0], ".".join((*owner[1], name)))


def _is_watched(kind: type) -> bool:
    """Return whether accesses to attributes of a class's objects can be recorded. Classes implemented in C are
    immutable."""
    return bool(kind.__flags__ & 1 << 9) and not kind.__flags__ & 1 << 8
