"""The Python state that a forward changes: attributes, variables, and the content of containers.

A capture undoes each run's changes, so that the next begins alike. A planned call makes the same changes, and its
guard checks the state that was read.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass, field
from types import FrameType, MappingProxyType
from typing import Any

import numpy as np
import torch

from rematplan.ir import ModelError
from rematplan.runtime.guards.attributes import BOOKKEEPING, Reads
from rematplan.runtime.guards.containers import (
    CONTAINERS,
    added,
    compared_in,
    containers_in,
    content,
    copied,
    lists_any,
    refill,
    unchanged_content,
)
from rematplan.runtime.guards.counted_numbers import Counting, Expression, Variable, expression_of, plain
from rematplan.runtime.guards.globals import GlobalReads
from rematplan.runtime.guards.iterators import is_iterator, progress, refuse_iterator
from rematplan.runtime.guards.namespace import Namespace
from rematplan.runtime.guards.places import Attribute, ClassAttributes, Fixed, Owner
from rematplan.runtime.guards.reachable import reached
from rematplan.runtime.guards.read_numbers import ReadNumber
from rematplan.runtime.guards.repeated_writes import IsNone, KnownKeys, Write, assign
from rematplan.runtime.guards.snapshots import UNSET, same
from rematplan.runtime.guards.value_flow import COUNTED, ITEM, READ, TESTED, WRITERS, use_of, uses_of

TENSORS = ("_parameters", "_buffers", "_modules")
"""The attributes of a module that have its tensors and submodules. They are compared separately."""
_NUMBERS = (int, float)
_WRITES = WRITERS | {ITEM}
FRESH = "fresh"
"""The use of a container that reads it when nothing of its earlier content is left."""


@dataclass
class _Alias:
    """One alias to a changed container: a ``name`` in namespace number ``at``, whose value is the container
    (``direct``) or has it inside."""

    at: int
    name: str
    direct: bool


@dataclass
class PythonState:
    """The Python state of a module before a forward that is traced, and the changes that the forward makes in it."""

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
    counting: Counting = field(default_factory=Counting)
    counted: dict[tuple[int, str], Expression] = field(default_factory=dict)
    """By namespace and name, the numbers that the present run of the forward counts with: what each is now."""
    numbers: list[tuple[int, str]] = field(default_factory=list)
    """The numbers that the last run of the forward changed, and perhaps only counts with."""
    iterators: dict[tuple[int, str], Any] = field(default_factory=dict)  # by where it is reached from
    progress: list[Any] = field(default_factory=list)
    unguarded: set[tuple[int, str]] = field(default_factory=set)
    guarded: set[tuple[int, str]] = field(default_factory=set)
    settled: set[tuple[int, str]] = field(default_factory=set)
    """The names that are set to what they were: a list that is made again of the same entries."""
    filled: set[tuple[int, str]] = field(default_factory=set)
    """Of the unguarded names, those that were None, are compared with None alone, and are set to something else."""
    conditions: list[Any] = field(default_factory=list)
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

    def begin(self) -> None:
        """Prepare for a run of the forward: restore the state, forget what the last run used, and count the numbers
        that it changed. Where no access is recorded, a counted number takes the number's place."""
        self.restore()
        self.undone.clear()
        self.uses.clear()
        self.keys.clear()
        self.counting = Counting()
        self.counted = {}
        self.progress = [progress(one) for one in self.iterators.values()]
        for at, name in self.numbers:
            namespace = self.namespaces[at]
            variable = Variable(namespace.place, name)
            self.counted[at, name] = variable
            if namespace.uses:
                number = self.counting.number(namespace.before[name], variable)
                assign(namespace.values, name, number)

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
        for namespace in self.namespaces:
            namespace.restore()
        for container, was in self.contents.values():
            if not unchanged_content(container, was):
                refill(container, was)

    def used(self, holder: Any, name: str, value: Any, frame: FrameType) -> Any:
        """Record a read of an attribute. Return the ``value`` of the attribute, as a counted number if the forward
        changes the attribute and this read only counts. `ModelError` for an iterator, and if a backward reads what the
        forward changes."""
        kind = type(value)
        for place, found in self.iterators.items():
            if name == place[1] and place == self._at(holder, name):
                refuse_iterator(name, found)
        if self.undone and self._at(holder, name) in self.undone:
            raise ModelError(
                f"the backward reads {name} (in a hook or an autograd.Function), and the forward changes it; read "
                f"it in the forward, and let the backward use that value"
            )
        if kind not in _NUMBERS and not isinstance(value, (*CONTAINERS, np.ndarray)):
            if is_iterator(value):
                refuse_iterator(name, value)
            if value is not None and not isinstance(value, torch.Tensor):
                return value
        owner = self.reads.owner_of(holder)
        at = self.places.get(owner) if owner is not None else None
        fresh = self.reads.fresh
        if owner is None or at is None or (owner, name) in fresh or name not in self.namespaces[at].values:
            return value
        use = use_of(frame.f_code, frame.f_lasti, name)
        if kind not in _NUMBERS and use == READ:
            use = self._read(at, owner, name, value)
        self.uses.setdefault((owner, name), []).append(use)
        if (at, name) not in self.counted:
            return value
        if use == COUNTED:
            return self.counting.number(value, self.counted[at, name])
        self.counting.reveal(self.counted[at, name])
        return value

    def _at(self, holder: Any, name: str) -> tuple[int | None, str]:
        owner = self.reads.owner_of(holder)
        return (None if owner is None else self.places.get(owner)), name

    def _read(self, at: int, owner: Owner, name: str, value: Any) -> str:
        """Return `FRESH` if an attribute is still its earlier dictionary, list or deque, without any earlier value;
        else `READ`, also for an empty dictionary, and a list or deque that was empty. A dictionary's earlier keys
        must also come first among the keys of its first such read, which `keys` remembers."""
        was = self._content_of(value)
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

    def _content_of(self, container: Any) -> Any:
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

    @property
    def moving(self) -> set[tuple[int, str]]:
        """The guarded names whose values the forward changes."""
        return self.guarded - self.settled

    def of_holders(self) -> tuple[set[tuple[Owner, str]], set[tuple[Owner, str]]]:
        """Return the attributes of modules and records that the forward changes: those that a guard checks, and those
        that it does not check."""
        guarded, unguarded = (
            {(owner, name) for at, name in names if (owner := self.namespaces[at].owner) is not None}
            for names in (self.guarded, self.unguarded)
        )
        return guarded, unguarded

    def of_shelves(self) -> tuple[dict[int, set[str]], dict[int, set[str]]]:
        """Return two mappings from ids of namespaces to changed names: those of variables that a guard checks, and
        those that it does not check. The second also has the attributes of `of_holders`, and the keys of dictionaries
        that are values of unchecked names."""
        guarded: dict[int, set[str]] = {}
        unguarded: dict[int, set[str]] = {}
        for names, found in ((self.guarded, guarded), (self.unguarded, unguarded)):
            for at, name in names:
                namespace = self.namespaces[at]
                where = unguarded if namespace.owner is not None else found
                where.setdefault(namespace.key, set()).add(name)
                value = namespace.before.get(name)
                if found is unguarded and isinstance(value, dict):
                    unguarded.setdefault(id(value), set()).update(map(str, value))
        return guarded, unguarded

    def changes(self) -> list[tuple[Write, Any]]:
        """Return what a planned call must change after its forward, each with its value, and decide which changes a
        guard checks (`guarded`, `unguarded`). Raises `ModelError` if an iterator advanced or content to be compared is
        too large."""
        for ((_, name), one), before in zip(self.iterators.items(), self.progress, strict=True):
            if progress(one) != before:
                refuse_iterator(name, one)
        self.unguarded, self.guarded, self.settled = set(), set(), set()
        self.conditions, self.numbers, self.filled = [], [], set()
        rebound = [(at, name) for at, n in enumerate(self.namespaces) for name in n.changed()]
        writes = [self._rebound(at, name) for at, name in rebound]
        self.conditions += self.counting.comparisons
        changed = [one for one, was in self.contents.values() if not unchanged_content(one, was)]
        every = self._aliases(changed)
        written: set[tuple[int, str]] = set(rebound)
        for container in changed:
            aliases = [alias for alias in every[id(container)] if (alias.at, alias.name) not in rebound]
            if aliases:
                writes += self._refilled(container, aliases, written)
        return writes

    def _rebound(self, at: int, name: str) -> tuple[Write, Any]:
        """Return the change of a name that has another value now, and the value; None if the change is ``remove`` or
        ``count``. Put the name into `guarded` or `unguarded`, maybe also into `numbers`."""
        namespace, one = self.namespaces[at], (at, name)
        now, before = namespace.now(name), namespace.before.get(name, UNSET)
        if now is UNSET:
            self.guarded.add(one)
            return Write(namespace.place, name, "remove", read=True), None
        if one in self.counted or self._only_counts(one, before, now):
            self.numbers.append(one)
        is_number = type(now) is ReadNumber
        if one in self.counted and not any(
            v.name == name and v.place is namespace.place for v in self.counting.revealed
        ):
            self.unguarded.add(one)
            if is_number:
                return Write(namespace.place, name, "number"), now
            expression = expression_of(now) if namespace.uses else self.counted[one]
            return Write(namespace.place, name, "count", expression), None
        self._sort(one, before, now)
        how = "number" if is_number else "set"
        return Write(namespace.place, name, how, read=one in self.guarded), copied(plain(now))

    def _only_counts(self, one: tuple[int, str], before: Any, now: Any) -> bool:
        """Return whether the next run may count with a number that this run was not prepared to count with."""
        numbers = type(before) in _NUMBERS and type(now) in (type(before), ReadNumber)
        return numbers and set(self._all_uses(*one)) == {COUNTED}

    def _sort(self, one: tuple[int, str], before: Any, now: Any) -> None:
        """Put a name that is set into `guarded` or `unguarded`, maybe also into `settled` or `filled`. If it is only
        compared with None, a condition is added."""
        namespace, name = self.namespaces[one[0]], one[1]
        if before is not UNSET and set(self._all_uses(*one)) == {TESTED}:
            self.unguarded.add(one)
            self.conditions.append(IsNone(namespace.place, name, before is None))
            if before is None and now is not None:
                self.filled.add(one)
        elif self._is_fresh(*one) or name in BOOKKEEPING:
            self.unguarded.add(one)
        else:
            self.guarded.add(one)
            inside = (self.contents.get(id(part)) for part in containers_in(before))
            if same(now, before) and all(known and unchanged_content(*known) for known in inside):
                self.settled.add(one)

    def _is_fresh(self, at: int, name: str) -> bool:
        """Return whether the forward sets a name before it reads it, or does not read it."""
        namespace = self.namespaces[at]
        if namespace.uses:
            return not namespace.uses(name)
        return namespace.owner is not None and (namespace.owner, name) in self.reads.fresh

    def _all_uses(self, at: int, name: str) -> Collection[str]:
        namespace = self.namespaces[at]
        if namespace.uses:
            return namespace.uses(name)
        return (READ,) if namespace.owner is None else self.uses.get((namespace.owner, name), ())

    def _aliases(self, changed: Sequence[Any]) -> dict[int, list[_Alias]]:
        """Return, by id, all aliases to the changed containers through values of names before the forward."""
        aliases: dict[int, list[_Alias]] = {id(container): [] for container in changed}
        if not changed:
            return aliases
        for at, namespace in enumerate(self.namespaces):
            for name, value in namespace.before.items():
                for container in reached(value, set(), self.known):
                    if id(container) in aliases:
                        aliases[id(container)].append(_Alias(at, name, container is value))
        return aliases

    def _refilled(
        self, container: Any, aliases: list[_Alias], written: set[tuple[int, str]]
    ) -> list[tuple[Write, Any]]:
        """Return the change of a container's content under one alias's name, which joins ``written``; none if it was
        there. The aliases go into `guarded` or `unguarded`; `ModelError` if the content is too large to be guarded."""
        aliases = [alias for alias in aliases if alias.name not in BOOKKEEPING] or aliases
        known = [alias for alias in aliases if self._all_uses(alias.at, alias.name)]
        uses = {use for a in known for use in (self._all_uses(a.at, a.name) if a.direct else (READ,))}
        direct = [alias for alias in aliases if alias.direct]
        direct.sort(key=lambda alias: self.namespaces[alias.at].owner is None)
        alias = (direct or aliases)[0]
        namespace, names = self.namespaces[alias.at], {(one.at, one.name) for one in aliases}
        how, items = "", None
        if uses and uses <= _WRITES | {FRESH} and direct:
            how, items = self._without_content(container, uses, direct)
        if how:
            self.unguarded |= names
        elif alias.name not in BOOKKEEPING:
            self.unguarded -= names
            self.guarded |= {(one.at, one.name) for one in known or [alias]}
            for one in known or [alias]:
                value = self.namespaces[one.at].before[one.name]
                if not any(container is seen for seen in compared_in(value)):
                    raise ModelError(
                        f"the forward changes what it finds in {one.name}, which is too large, or no container, to be "
                        f"compared at every call; change it outside the forward"
                    )
        if (alias.at, alias.name) in written:
            return []
        written.add((alias.at, alias.name))
        if how == "add":
            return [(Write(namespace.place, alias.name, "add"), items)]
        write = Write(namespace.place, alias.name, "refill", read=not names <= self.unguarded)
        return [(write, copied(namespace.before[alias.name]))]

    def _without_content(self, container: Any, uses: set[str], direct: Sequence[_Alias]) -> tuple[str, Any]:
        """Return how to change a container of whose earlier content nothing is read: "add" with the items, "whole" for
        new content, or "" if unknown. For a dictionary that is `FRESH`, add what its keys must be to `conditions`."""
        was = self._content_of(container)
        owners = [(self.namespaces[alias.at].owner, alias.name) for alias in direct]
        while_running = {use for owner, name in owners if owner for use in self.uses.get((owner, name), ())}
        if FRESH in uses:
            for owner, name in owners:
                if owner is not None and (owner, name) in self.keys:
                    self.conditions.append(KnownKeys(Attribute(owner), name, self.keys[owner, name]))
            return "whole", None
        if "clear" in while_running:
            return "whole", None
        if "clear" in uses and not len(was):
            return "", None  # it may have been called, with no effect
        items = added(container, was)
        if items is None and len(was) and "clear" in uses:
            return "whole", None
        return ("add", items) if items is not None else ("", None)


def _is_watched(kind: type) -> bool:
    """Return whether accesses to attributes of a class's objects can be recorded. Classes implemented in C are
    immutable."""
    return bool(kind.__flags__ & 1 << 9) and not kind.__flags__ & 1 << 8
