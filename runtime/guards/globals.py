"""What the code of a forward names outside of its modules: global variables, cells of closures, default arguments,
the environment, attributes of the classes and objects among them, of those in its arguments and of those that its
modules hold.

It is found in the code, not by listening while it runs, which would double the time of a trace: what a function names
counts as read, also on a branch that is not taken.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextvars import ContextVar
from dataclasses import dataclass, field
from functools import cache, partial
from inspect import getattr_static
from itertools import chain
from types import BuiltinMethodType, FunctionType, MethodType, ModuleType
from typing import Any

import torch
from torch import nn

from rematplan.runtime.graph.generators import GENERATORS
from rematplan.runtime.graph.warn import warn
from rematplan.runtime.guards.attributes import BOOKKEEPING, is_record
from rematplan.runtime.guards.bytecode import (
    Names,
    is_library,
    named_in,
    packages_of,
    strings_in,
    variables_in,
)
from rematplan.runtime.guards.places import Fixed, Found
from rematplan.runtime.guards.snapshots import PLAIN, is_data, kept, parts_of, unchanged

_UNNAMED = frozenset({"__call__", "forward", "backward", "setup_context"})
"""What is called without being named."""
_ENVIRONMENT = frozenset({"environ", "getenv"})
"""What code names that looks at variables of the environment."""


@dataclass
class _Shelf:
    """A place with values by name, and those that were found there."""

    values: Mapping[str, Any]
    found: dict[str, Any] = field(default_factory=dict)


class GlobalReads:
    """What the forwards of some modules name, as it is when this is made."""

    def __init__(self, modules: Sequence[nn.Module], arguments: Sequence[Any] = ()) -> None:
        self.shelves: dict[int, _Shelf] = {}
        self.waiting: list[tuple[Any, Names]] = []
        self.met: set[tuple[int, Names]] = set()
        self.names: Names = frozenset()  # of all code that was looked into
        self.generators: dict[int, Any] = {}
        """By id, the generators of random numbers that were met."""
        self.walked = {id(vars(module)) for module in modules}  # which a planned module shares with its model
        kinds = dict.fromkeys(map(type, modules))
        self.own = packages_of(modules)
        for kind in kinds:
            self._meet(kind, _UNNAMED)
        held = [v for module in modules for name, v in vars(module).items() if name not in BOOKKEEPING]
        for value in held:
            self._meet(value, _UNNAMED)
        self._follow()
        # What is passed on, or held in a container, goes by other names where its attributes are read.
        for thing in (*parts_of(arguments), *(part for value in held for part in parts_of(value))):
            self._meet(thing, self.names)
        self._follow()

    def _follow(self) -> None:
        while self.waiting:
            thing, names = self.waiting.pop()
            for holder, values, wanted, named in self._places(thing, names):
                for name in wanted & values.keys():
                    self._note(thing, holder, values, name, named)

    def found_in_places(self, model: str) -> list[Found]:
        """What a plan depends on. What the forward has changed meanwhile is not among it; a warning tells that a
        planned one does not. ``model``: its name."""
        found, changed = [], set[str]()
        for shelf in self.shelves.values():
            objects, copies = unchanged(shelf.found, shelf.values)
            found.append(Found(Fixed(shelf.values), objects, copies))
            changed |= shelf.found.keys() - objects.keys() - copies.keys()
        if changed:
            warn(f"the forward of {model} sets {', '.join(sorted(changed))}, which a planned one does not")
        return found

    def _note(self, thing: Any, holder: Any, values: Mapping[str, Any], name: str, named: Names) -> None:
        """A code that names all of ``named`` names what a thing has under ``name``, in one of its holders."""
        value = values[name]
        # A registry may grow: its keys are names of their own.
        registry = isinstance(value, dict) and not is_data(value)
        if not isinstance(value, ModuleType):
            shelf = self.shelves.setdefault(id(holder), _Shelf(values))
            shelf.found.setdefault(name, value if registry else kept(value))
        self._meet(value, named)
        function = _inside(value) if isinstance(thing, type) or self._is_object(thing) else None
        if function:  # a method names others of its object
            self._meet(thing, named_in(function.__code__))

    def _meet(self, thing: Any, names: Names) -> None:
        if isinstance(thing, GENERATORS):
            self.generators[id(thing)] = thing
        if (id(thing), names) not in self.met:
            self.met.add((id(thing), names))
            self.waiting.append((thing, names))

    def _places(self, thing: Any, names: Names) -> Iterator[tuple[Any, Mapping[str, Any], Names, Names]]:
        """Where a thing keeps what is meant by those who name ``names`` beside it: holder, values by name, the names
        looked for, and all names of the code that they are in."""
        own: Names = _UNNAMED
        if function := _inside(thing):
            own = named_in(function.__code__)
            if not self._is_library(function.__module__):
                self.names |= own
                yield function.__globals__, function.__globals__, variables_in(function.__code__), own
                if _ENVIRONMENT & own:
                    variables = _ByName(
                        filter(str.isidentifier, strings_in(function.__code__)), os.environ.get
                    )
                    yield function.__code__, variables, variables.names, own
            held = _held(function, self._is_library(function.__module__))
            yield function, held, held.names, own
        for part in _bound(thing):
            self._meet(part, own)
        if isinstance(thing, ModuleType):
            if not self._is_library(thing.__name__):
                yield thing, vars(thing), names, names
            return
        if isinstance(thing, dict):
            yield thing, thing, names, names
        elif isinstance(thing, ContextVar):
            yield thing, _ByName(["value"], lambda _: _current(thing)), frozenset({"value"}), names
        elif isinstance(thing, nn.Module):  # one that is no part of the model
            if id(vars(thing)) in self.walked or isinstance(thing, torch.jit.ScriptModule):
                return  # what is scripted has its settings in its own code
            function = _inside(getattr_static(type(thing), "forward"))
            settings = named_in(function.__code__) if function else names
            yield thing, vars(thing), settings - BOOKKEEPING | settings & {"training"}, names
            yield thing._modules, thing._modules, frozenset(thing._modules), names
        elif self._is_object(thing):
            attributes = vars(thing) if hasattr(thing, "__dict__") else _slots(thing)
            yield thing, attributes, names, names
        elif not isinstance(thing, type):
            return
        for home in (thing if isinstance(thing, type) else type(thing)).__mro__:
            if not self._is_library(home.__module__):
                yield home, vars(home), names | _UNNAMED, names

    def _is_object(self, thing: Any) -> bool:
        """Whether something is there for its attributes, or is called and may go by them."""
        if is_record(thing) or isinstance(thing, (type, nn.Module, torch.Tensor)):
            return is_record(thing)
        kind = type(thing)
        return not self._is_library(kind.__module__) and (
            hasattr(thing, "__dict__") or hasattr(kind, "__slots__")
        )

    def _is_library(self, module: str | None) -> bool:
        return is_library(module, self.own)


class _ByName(Mapping[str, Any]):
    """What there is of some names; what there is of one is asked for each time."""

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


def _current(variable: ContextVar[Any]) -> Any:
    try:
        return variable.get()
    except LookupError:
        return None


def _held(function: FunctionType, library: bool) -> _ByName:
    """What a function has of the functions around it, as far as it is there yet, and the default arguments that may
    change of one that is no library's: a library's decorator has there what it decorates."""
    cells = dict(zip(function.__code__.co_freevars, function.__closure__ or (), strict=True))
    defaults = {} if library else _defaults(function)
    return _ByName((*cells, *defaults), lambda n: defaults[n] if n in defaults else cells[n].cell_contents)


def _defaults(function: FunctionType) -> dict[str, Any]:
    code, values = function.__code__, function.__defaults__ or ()
    names = code.co_varnames[code.co_argcount - len(values) : code.co_argcount]
    every = {**dict(zip(names, values, strict=True)), **(function.__kwdefaults__ or {})}
    return {name: value for name, value in every.items() if type(value) not in PLAIN}


def _slots(holder: Any) -> _ByName:
    """The attributes that an object has in slots."""
    slots = (vars(home).get("__slots__", ()) for home in type(holder).__mro__)
    names = chain.from_iterable((s,) if isinstance(s, str) else s for s in slots)
    return _ByName(names, partial(getattr, holder))


_AROUND = {
    MethodType: "__func__",
    staticmethod: "__func__",
    classmethod: "__func__",
    property: "fget",
    partial: "func",
    type(cache(len)): "__wrapped__",
}
"""Where things to call have the function that they are made of, by type."""


def _inside(thing: Any) -> FunctionType | None:
    """The function that runs where a thing is called, or asked for."""
    while type(thing) in _AROUND:
        thing = getattr(thing, _AROUND[type(thing)])
    return thing if isinstance(thing, FunctionType) else None


def _bound(thing: Any) -> tuple[Any, ...]:
    """What a bound method or a partial function runs with."""
    if isinstance(thing, (MethodType, BuiltinMethodType)):
        return (thing.__self__,)
    return (thing.func, *thing.args, *thing.keywords.values()) if isinstance(thing, partial) else ()
