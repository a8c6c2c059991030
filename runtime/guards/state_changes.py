"""What a run of a forward changed in the Python state, and which of these changes a guard must check.

A planned call makes the same changes, and its guard checks the state that was read.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass, field
from typing import Any

from rematplan.ir import ModelError
from rematplan.runtime.guards.attributes import BOOKKEEPING
from rematplan.runtime.guards.containers import (
    added,
    compared_in,
    containers_in,
    copied,
    unchanged_content,
)
from rematplan.runtime.guards.counted_numbers import expression_of, plain
from rematplan.runtime.guards.iterators import progress, refuse_iterator
from rematplan.runtime.guards.looked_up import PRESENT, KnownItems
from rematplan.runtime.guards.namespace import Namespace
from rematplan.runtime.guards.places import Attribute, Owner
from rematplan.runtime.guards.python_state import FRESH, NUMBERS, PythonState
from rematplan.runtime.guards.reachable import reached
from rematplan.runtime.guards.read_numbers import ReadNumber
from rematplan.runtime.guards.repeated_writes import IsNone, KnownKeys, Write
from rematplan.runtime.guards.snapshots import UNSET, same
from rematplan.runtime.guards.value_flow import COUNTED, ITEM, KEYED, READ, TESTED, WRITERS

_WRITES = WRITERS | {ITEM}
Names = frozenset[tuple[int, str]]
"""Names in namespaces, each with the position of its namespace in `PythonState.namespaces`."""


@dataclass(frozen=True, eq=False)
class Changes:
    """The names that a run of a forward changed in the Python state, and what a guard must check for that."""

    namespaces: Sequence[Namespace] = ()
    """Those of the state, to whose positions the names below refer."""
    guarded: Names = frozenset()
    """The changed names that a guard checks."""
    unguarded: Names = frozenset()
    """Those that it does not check."""
    settled: Names = frozenset()
    """The names that are set to what they were: a list that is made again of the same entries."""
    extended: Names = frozenset()
    """Of the unguarded names, those of dictionaries that get items for keys which the forward looks up."""
    filled: Names = frozenset()
    """Of the unguarded names, those that were None, are compared with None alone, and are set to something else."""
    numbers: Sequence[tuple[int, str]] = ()
    """The changed numbers with which the forward perhaps only counts."""
    conditions: Sequence[Any] = ()
    """Further conditions that a guard checks."""

    @property
    def moving(self) -> Names:
        """The names whose values the forward changes and reads."""
        return self.guarded - self.settled | self.extended

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


@dataclass(frozen=True)
class _Alias:
    """One alias to a changed container: a ``name`` in namespace number ``at``, whose value is the container
    (``direct``) or has it inside."""

    at: int
    name: str
    direct: bool


def find_changes(state: PythonState) -> tuple[list[tuple[Write, Any]], Changes]:
    """Return what the run of the forward since `PythonState.begin` has changed: first what a planned call must change
    after its forward, each with its value. `ModelError` if an iterator advanced or content to be compared is too
    large."""
    return _Search(state).run()


@dataclass
class _Search:
    """The search for changes, and what it has found so far: the fields of `Changes`."""

    state: PythonState
    unguarded: set[tuple[int, str]] = field(default_factory=set)
    guarded: set[tuple[int, str]] = field(default_factory=set)
    settled: set[tuple[int, str]] = field(default_factory=set)
    extended: set[tuple[int, str]] = field(default_factory=set)
    filled: set[tuple[int, str]] = field(default_factory=set)
    numbers: list[tuple[int, str]] = field(default_factory=list)
    conditions: list[Any] = field(default_factory=list)

    def run(self) -> tuple[list[tuple[Write, Any]], Changes]:
        """Find the writes, and decide which changes a guard checks (`guarded`, `unguarded`)."""
        for ((_, name), one), before in zip(self.state.iterators.items(), self.state.progress, strict=True):
            if progress(one) != before:
                refuse_iterator(name, one)
        rebound = [(at, name) for at, n in enumerate(self.state.namespaces) for name in n.changed()]
        writes = [self._rebound(at, name) for at, name in rebound]
        self.conditions += self.state.counting.comparisons
        changed = [one for one, was in self.state.contents.values() if not unchanged_content(one, was)]
        every = self._aliases(changed)
        written: set[tuple[int, str]] = set(rebound)
        for container in changed:
            aliases = [alias for alias in every[id(container)] if (alias.at, alias.name) not in rebound]
            if aliases:
                writes += self._refilled(container, aliases, written)
        self._guard_items()
        return writes, Changes(
            namespaces=self.state.namespaces,
            guarded=frozenset(self.guarded),
            unguarded=frozenset(self.unguarded),
            settled=frozenset(self.settled),
            extended=frozenset(self.extended - self.guarded),
            filled=frozenset(self.filled),
            numbers=self.numbers,
            conditions=self.conditions,
        )

    def _guard_items(self) -> None:
        """Let dictionaries in which the forward only looks up single keys be guarded by these keys' values."""
        for one, lookups in self.state.lookups.items():
            namespace, uses = self.state.namespaces[one[0]], set(self._all_uses(*one))
            if one not in self.guarded and (one in self.unguarded or KEYED in uses <= {KEYED, ITEM}):
                lookups.note_without_effect(namespace.now(one[1]))
                self.unguarded.add(one)
                self.conditions.append(KnownItems(namespace.place, one[1], lookups.items))

    def _rebound(self, at: int, name: str) -> tuple[Write, Any]:
        """Return the change of a name that has another value now, and the value; None if the change is ``remove`` or
        ``count``. Put the name into `guarded` or `unguarded`, maybe also into `numbers`."""
        namespace, one = self.state.namespaces[at], (at, name)
        now, before = namespace.now(name), namespace.before.get(name, UNSET)
        if now is UNSET:
            self.guarded.add(one)
            return Write(namespace.place, name, "remove", read=True), None
        if one in self.state.counted or self._only_counts(one, before, now):
            self.numbers.append(one)
        is_number = type(now) is ReadNumber
        if one in self.state.counted and not any(
            v.name == name and v.place is namespace.place for v in self.state.counting.revealed
        ):
            self.unguarded.add(one)
            if is_number:
                return Write(namespace.place, name, "number"), now
            expression = expression_of(now) if namespace.uses else self.state.counted[one]
            return Write(namespace.place, name, "count", expression), None
        self._sort(one, before, now)
        how = "number" if is_number else "set"
        return Write(namespace.place, name, how, read=one in self.guarded), copied(plain(now))

    def _only_counts(self, one: tuple[int, str], before: Any, now: Any) -> bool:
        """Return whether the next run may count with a number that this run was not prepared to count with."""
        numbers = type(before) in NUMBERS and type(now) in (type(before), ReadNumber)
        return numbers and set(self._all_uses(*one)) == {COUNTED}

    def _sort(self, one: tuple[int, str], before: Any, now: Any) -> None:
        """Put a name that is set into `guarded` or `unguarded`, maybe also into `settled` or `filled`. If it is only
        compared with None, a condition is added."""
        namespace, name = self.state.namespaces[one[0]], one[1]
        if before is not UNSET and set(self._all_uses(*one)) == {TESTED}:
            self.unguarded.add(one)
            self.conditions.append(IsNone(namespace.place, name, before is None))
            if before is None and now is not None:
                self.filled.add(one)
        elif self._is_fresh(*one) or name in BOOKKEEPING:
            self.unguarded.add(one)
        else:
            self.guarded.add(one)
            inside = (self.state.contents.get(id(part)) for part in containers_in(before))
            if same(now, before) and all(known and unchanged_content(*known) for known in inside):
                self.settled.add(one)

    def _is_fresh(self, at: int, name: str) -> bool:
        """Return whether the forward sets a name before it reads it, or does not read it."""
        namespace = self.state.namespaces[at]
        if namespace.uses:
            return not namespace.uses(name)
        return namespace.owner is not None and (namespace.owner, name) in self.state.reads.fresh

    def _all_uses(self, at: int, name: str) -> Collection[str]:
        namespace, lookups = self.state.namespaces[at], self.state.lookups.get((at, name))
        if namespace.uses:
            found: Collection[str] = namespace.uses(name)
        elif namespace.owner is None:
            found = (READ,)
        else:
            found = self.state.uses.get((namespace.owner, name), ())
        whole = lookups is None or lookups.whole
        return [READ if use == KEYED and whole else use for use in found]

    def _aliases(self, changed: Sequence[Any]) -> dict[int, list[_Alias]]:
        """Return, by id, all aliases to the changed containers through values of names before the forward."""
        aliases: dict[int, list[_Alias]] = {id(container): [] for container in changed}
        if not changed:
            return aliases
        for at, namespace in enumerate(self.state.namespaces):
            for name, value in namespace.before.items():
                for container in reached(value, set(), self.state.known):
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
        direct.sort(key=lambda alias: self.state.namespaces[alias.at].owner is None)
        alias = (direct or aliases)[0]
        namespace, names = self.state.namespaces[alias.at], {(one.at, one.name) for one in aliases}
        how, items = "", None
        if uses and uses <= _WRITES | {FRESH, KEYED} and direct:
            how, items = self._without_content(container, uses, direct)
        if how:
            self.unguarded |= names
        elif alias.name not in BOOKKEEPING:
            self.unguarded -= names
            self.guarded |= {(one.at, one.name) for one in known or [alias]}
            for one in known or [alias]:
                value = self.state.namespaces[one.at].before[one.name]
                if not any(container is seen for seen in compared_in(value)):
                    raise ModelError(
                        f"the forward changes what it finds in {one.name}, which is too large, or no container, to be "
                        f"compared at every call; change it outside the forward"
                    )
        if (alias.at, alias.name) in written:
            return []
        written.add((alias.at, alias.name))
        if how == "add":
            read = (alias.at, alias.name) in self.extended
            return [(Write(namespace.place, alias.name, "add", read=read), items)]
        write = Write(namespace.place, alias.name, "refill", read=not names <= self.unguarded)
        return [(write, copied(namespace.before[alias.name]))]

    def _without_content(self, container: Any, uses: set[str], direct: Sequence[_Alias]) -> tuple[str, Any]:
        """Return how to change a container of whose earlier content nothing is read but values of keys that keep them:
        "add" with the items, "whole" for new content, or "" if unknown. For a dictionary that is `FRESH`, add what its
        keys must be to `conditions`."""
        was = self.state.content_of(container)
        owners = [(self.state.namespaces[alias.at].owner, alias.name) for alias in direct]
        while_running = {
            use for owner, name in owners if owner for use in self.state.uses.get((owner, name), ())
        }
        if FRESH in uses:
            for owner, name in owners:
                if owner is not None and (owner, name) in self.state.keys:
                    self.conditions.append(KnownKeys(Attribute(owner), name, self.state.keys[owner, name]))
            return "whole", None
        if "clear" in while_running:
            return "whole", None
        if "clear" in uses and not len(was):
            return "", None  # it may have been called, with no effect
        items = added(container, was)
        if items is None and len(was) and "clear" in uses:
            return "whole", None
        places = [one for alias in direct if (one := (alias.at, alias.name)) in self.state.lookups]
        known = [self.state.lookups[one] for one in places]
        replaced = [key for key in items or () if key in was] if known else []
        looked_up = {key for lookups in known for key in lookups.items}
        if items is None or not looked_up.isdisjoint(replaced):
            return "", None
        if known and not looked_up.isdisjoint(items):
            self.extended.update(places)
        for lookups in known:
            lookups.items |= dict.fromkeys(replaced, PRESENT)
        return "add", items
