"""Recording of the attributes that a forward reads from modules, records in their attributes, and classes."""

from __future__ import annotations

import sys
import threading
import weakref
from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import contextmanager, suppress
from enum import Enum
from threading import get_ident
from types import FrameType
from typing import Any

import torch
from torch import fx, nn

from rematplan.runtime.guards.bytecode import is_library, named_in, packages_of, strings_in
from rematplan.runtime.guards.places import (
    Answers,
    Asked,
    Attribute,
    Attributes,
    Fixed,
    Found,
    Owner,
    SharedRecord,
    record_of,
)
from rematplan.runtime.guards.snapshots import PLAIN, is_data, kept, unchanged

_DEPTH = 2


class Reads:
    """The attributes that a forward reads or sets of its holders: the modules, and the records (`is_record`) in their
    attributes. Inside `reads_of`, each access calls a method ``note_…``."""

    def __init__(self, modules: Sequence[nn.Module]) -> None:
        """Find the holders: ``modules`` and the records in their attributes, with the classes whose attribute access
        must be replaced."""
        self.owners: dict[int, Owner] = {}
        """Where each module and record is, by the id of its ``__dict__``, which a planned module shares with its
        model."""
        self.things: set[int] = set()
        """The ids of all modules and records."""
        self.kinds: set[type] = {nn.Module}
        """The classes whose attribute lookup must be replaced."""
        self.use: Callable[[Any, str, Any, FrameType], Any] = lambda _holder, _name, value, _frame: value
        """Is called with each module or record that is read, the attribute's name and value, and the frame that reads.
        Returns the value that the reader gets."""
        self.store: Callable[[Any, str, Any], Any] = lambda _holder, _name, value: value
        """Is called with each module or record of which an attribute is set, its name and value. Returns the value that
        is stored."""
        self.found: dict[tuple[Owner, str], None] = {}
        """The attributes that were read, by holder and name."""
        self.met: dict[int, tuple[Any, dict[Owner, None]]] = {}
        """By id, the records that were read, each with all positions (`Owner`) at which it was found."""
        self.asked: set[tuple[Owner, str]] = set()
        """Attributes that were looked up before they were set."""
        self.fresh: set[tuple[Owner, str]] = set()
        """Attributes that were set before they were read: the forward produces them and does not depend on them."""
        self.holders: dict[Owner, Any] = {}
        """All modules and records by position."""
        self.inherited: dict[Owner, dict[str, None]] = {}
        """By holder, the names that were found in its class or nowhere, but not in its ``__dict__``."""
        self.classes: dict[type, dict[str, Any]] = {}
        """By class, the class attributes that were read, by name."""
        self.answering: dict[int, Owner] = {}
        """By id, the positions of records whose class has a ``__getattr__``."""
        self.answers: dict[Owner, tuple[Any, dict[str, Any]]] = {}
        """By position, each record whose class has a ``__getattr__``, and the results of that method by name."""
        self.modules, self.own = modules, packages_of(modules)
        for at, module in enumerate(modules):
            self._look_into(module, (at, ()))

    def _look_into(self, holder: Any, owner: Owner) -> None:
        """Register a holder at its position, and the records in its attributes, down to `_DEPTH` levels below the
        module."""
        self.owners.setdefault(id(vars(holder)), owner)
        self.holders[owner] = holder
        self.things.add(id(holder))
        self._may_answer(holder, owner)
        for name, value in vars(holder).items():
            if is_record(value) and id(value) not in self.things and len(owner[1]) < _DEPTH:
                self.kinds.add(type(value))
                self._look_into(value, (owner[0], (*owner[1], name)))

    def _may_answer(self, holder: Any, owner: Owner) -> None:
        """Register a record whose class has ``__getattr__`` for `note_answer`, and keep it alive: Python reuses ids."""
        if is_record(holder) and _has_getattr(type(holder)):
            self.answering[id(holder)] = owner
            self.answers.setdefault(owner, (holder, {}))

    def every_holder(self) -> list[tuple[Owner, Any, dict[str, Any]]]:
        """Return all modules and records: the position, the module or record, and its ``__dict__``."""
        return [(owner, h, object.__getattribute__(h, "__dict__")) for owner, h in self.holders.items()]

    def owner_of(self, holder: Any) -> Owner | None:
        """Return the position of a module or record; None for another object."""
        return self.owners.get(id(object.__getattribute__(holder, "__dict__")))

    def note(self, holder: Any, name: str, value: Any) -> None:
        """Record that the forward read an attribute. Nothing is recorded if the forward set the attribute before,
        `ModuleState` covers it, its name begins with ``__``, or the holder is unknown."""
        owner = self.owner_of(holder)
        if owner is None or (owner, name) in self.fresh or name.startswith("__"):
            return
        if name not in object.__getattribute__(holder, "__dict__"):
            self._note_inherited(owner, type(holder), name)
        elif id(value) in self.things:
            if is_record(value):
                self._note_record(value, self.owner_of(value), (owner[0], (*owner[1], name)))
        elif (type(value) in PLAIN and (name != "training" or owner[1])) or name not in BOOKKEEPING:
            self.found[owner, name] = None

    def _note_record(self, record: Any, *owners: Owner | None) -> None:
        _, known = self.met.setdefault(id(record), (record, {}))
        known.update((owner, None) for owner in owners if owner is not None)

    def _note_inherited(self, owner: Owner, kind: type, name: str) -> None:
        home = next((c for c in kind.__mro__ if name in vars(c)), nn.Module)
        if home is not nn.Module:
            self.inherited.setdefault(owner, {})[name] = None
            self.classes.setdefault(home, {}).setdefault(name, kept(vars(home)[name]))

    def note_attributes(self, holder: Any, reader: FrameType) -> None:
        """Record that code read a holder's ``__dict__``: all attributes that the code names count as read. If it names
        ``items`` or ``values``, and no attribute by a string, all data attributes count. Reads by library code, or of a
        record with a ``__getattr__``, are not recorded."""
        known = self.owner_of(holder) is not None and id(holder) not in self.answering
        if known and not is_library(reader.f_globals.get("__name__"), self.own):
            attributes = object.__getattribute__(holder, "__dict__")
            named = named_in(reader.f_code)
            if not {"items", "values"}.isdisjoint(named) and attributes.keys().isdisjoint(
                strings_in(reader.f_code)
            ):
                named = frozenset(n for n, v in attributes.items() if n not in BOOKKEEPING and is_data(v))
            for name in named:
                if name in attributes:
                    self.note(holder, name, attributes[name])
                    self.use(holder, name, attributes[name], reader)
                elif not hasattr(type(holder), name):
                    self.note_absent(holder, name)

    def note_asked(self, holder: Any, name: str) -> None:
        """Record that the forward looks up an attribute, maybe in vain. If the forward sets the attribute later, it
        still depends on the earlier value."""
        owner = self.owner_of(holder)
        if owner is not None and (owner, name) not in self.fresh:
            self.asked.add((owner, name))

    def note_absent(self, holder: Any, name: str) -> None:
        """Record that the forward looked up a name that neither a holder's ``__dict__`` nor its class has. A guard
        checks that the ``__dict__`` still lacks it."""
        owner = self.owner_of(holder)
        if owner is not None and (owner, name) not in self.fresh and not name.startswith("__"):
            self.inherited.setdefault(owner, {})[name] = None

    def note_answer(self, holder: Any, name: str, value: Any) -> None:
        """Record that a record's ``__getattr__`` returned ``value``, if ``answering`` has the record and ``name`` does
        not begin with ``__``. If ``value`` is such a record too, and ``holder`` at most `_DEPTH` attributes below its
        module, the answers of ``value`` are recorded instead."""
        owner = self.answering.get(id(holder))
        if owner is None or name.startswith("__"):
            return
        at, path = owner
        if len(path) <= _DEPTH:
            self._may_answer(value, (at, (*path, name)))
        if id(value) in self.answering:
            self._note_record(value, self.answering[id(value)], (at, (*path, name)))
        else:
            self.answers[owner][1].setdefault(name, kept(value))

    def note_set(self, holder: Any, name: str) -> None:
        """Record that the forward set an attribute. Later reads are not recorded, unless the forward had looked up the
        attribute before."""
        owner = self.owner_of(holder)
        if owner is not None and (owner, name) not in self.asked:
            # The forward does not depend on a value that it produces itself.
            self.fresh.add((owner, name))

    def found_in_places(
        self, guarded: Collection[tuple[Owner, str]], unguarded: Collection[tuple[Owner, str]]
    ) -> list[Found]:
        """Return the attributes on which a plan depends, those read or ``guarded`` and not ``unguarded``, as one
        `Found` for each place. A place is a ``__dict__``, the results of a record's ``__getattr__``, or a class. Of the
        last two, values that have changed since they were read are left out."""
        owned: dict[Owner, dict[str, Any]] = {owner: {} for owner in self.inherited}
        for owner, name in (*self.found, *guarded):
            values = vars(self.holders[owner])
            if name in values and (owner, name) not in unguarded:
                owned.setdefault(owner, {})[name] = kept(values[name])
        own = [
            Found(
                Attribute(owner),
                *unchanged(values, vars(self.holders[owner])),
                tuple(n for n in self.inherited.get(owner, ()) if n not in vars(self.holders[owner])),
            )
            for owner, values in owned.items()
        ]
        answers = [
            Found(Answers(owner), *unchanged(values, Asked(holder)))
            for owner, (holder, values) in self.answers.items()
        ]
        classes = [Found(Fixed(vars(c)), *unchanged(values, vars(c))) for c, values in self.classes.items()]
        return [*own, *answers, *classes]

    def shared(self) -> list[SharedRecord]:
        """Return the records that the forward read, each with all positions at which it was found, if it is still at
        all of them."""
        attributes = [vars(module) for module in self.modules]
        return [
            SharedRecord(type(record), tuple(owners))
            for record, owners in self.met.values()
            if all(_is_at(owner, record, attributes) for owner in owners)
        ]


def _is_at(owner: Owner, record: Any, attributes: Attributes) -> bool:
    try:
        return record_of(owner, attributes) is record
    except (LookupError, AttributeError):
        return False


BOOKKEEPING = frozenset({*vars(nn.Module), *vars(nn.Module())}) - {"forward"}
"""Attributes in which `nn.Module` keeps its submodules, hooks, tensors and mode. `ModuleState` covers these."""


@contextmanager
def reads_of(modules: Sequence[nn.Module]) -> Iterator[Reads]:
    """Record, inside the block, which attributes of modules and their records this thread reads and sets, in the
    `Reads` that the block gets. Meanwhile the methods by which Python accesses them are replaced; accesses of other
    threads are not recorded."""
    reads = Reads(modules)
    thread = get_ident()  # all threads see the replaced methods

    def noting(get: Any) -> Any:
        def noted(holder: Any, name: str) -> Any:
            """Return what ``get`` returns and record the read; `Reads.use` may replace the value. Nothing is recorded
            in other threads; a read of ``__dict__`` counts as one of the attributes that the reader names."""
            if get_ident() != thread:
                return get(holder, name)
            if name == "__dict__":
                reads.note_attributes(holder, sys._getframe(1))
                return get(holder, name)
            reads.note_asked(holder, name)
            own = name in object.__getattribute__(holder, "__dict__")
            try:
                value = get(holder, name)
            except AttributeError:
                reads.note_absent(holder, name)
                raise
            if not own and name in object.__getattribute__(holder, "__dict__"):
                reads.note_absent(holder, name)  # the lookup made it, as `functools.cached_property` does
            reads.note(holder, name, value)
            return reads.use(holder, name, value, sys._getframe(1))

        return noted

    def noting_answers(get: Any) -> Any:
        def noted(holder: Any, name: str) -> Any:
            value = get(holder, name)
            if get_ident() == thread:
                reads.note_answer(holder, name, value)
            return value

        return noted

    def noting_sets(set_: Any) -> Any:
        def noted(holder: Any, name: str, value: Any) -> None:
            if get_ident() != thread:
                set_(holder, name, value)
                return
            set_(holder, name, reads.store(holder, name, value))
            reads.note_set(holder, name)

        return noted

    answering = {kind for kind in reads.kinds - {nn.Module} if _has_getattr(kind)}
    with (
        _replaced(reads.kinds, "__setattr__", noting_sets),
        _replaced(reads.kinds, "__getattribute__", noting),
        _replaced(answering, "__getattr__", noting_answers),
    ):
        yield reads


@contextmanager
def _replaced(kinds: Collection[type], name: str, by: Callable[[Any], Any]) -> Iterator[None]:
    """Replace, inside the block, the method ``name`` of some classes, own or inherited, by ``by(method)``. Classes
    implemented in C are left as they are."""
    plain = {kind: getattr(kind, name) for kind in kinds}
    own = {kind for kind in kinds if name in vars(kind)}
    try:
        for kind, method in plain.items():
            with suppress(TypeError):  # classes implemented in C are immutable
                setattr(kind, name, by(method))
        yield
    finally:
        for kind, method in plain.items():
            with suppress(TypeError, AttributeError):
                if kind in own:
                    setattr(kind, name, method)
                else:
                    delattr(kind, name)


def _has_getattr(kind: type) -> bool:
    """Return whether a class, and not only its metaclass, has a ``__getattr__``."""
    return any("__getattr__" in vars(home) for home in kind.__mro__)


NO_RECORDS = (
    type,
    Enum,
    torch.Tensor,
    torch.Generator,
    dict,
    list,
    set,
    tuple,
    fx.Graph,
    fx.Node,
    threading.local,
)


def is_record(value: Any) -> bool:
    """Return whether an object exists for its attributes, such as a configuration: with a ``__dict__``, of no built-in
    type, not callable. Objects of `NO_RECORDS`, such as containers and tensors, and weak proxies are none."""
    kind = type(value)
    return (
        kind.__module__ != "builtins"
        and hasattr(value, "__dict__")
        and not callable(value)
        and not isinstance(value, NO_RECORDS)
        and type(value) not in weakref.ProxyTypes
    )
