"""Recording of the values outside its modules to which a forward's code refers: variables, cells, defaults,
environment, attributes of objects.

References are found in the bytecode, since tracing the execution would double the time of a capture. What a function
names counts as read, even in a branch that is not taken.
"""

from __future__ import annotations

import builtins
import copyreg
import os
import sys
import threading
import weakref
from collections import deque
from collections.abc import Iterator, Mapping, Sequence, Set
from contextvars import ContextVar
from dataclasses import dataclass, field
from functools import cache, cached_property, partial
from inspect import getattr_static
from itertools import zip_longest
from types import BuiltinMethodType, CodeType, FunctionType, MappingProxyType, MethodType, ModuleType
from typing import Any

import numpy as np
import torch
from torch import nn

from rematplan.runtime.graph.host_generators import GENERATORS, seeding_functions
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
from rematplan.runtime.guards.module_state import HOOKS
from rematplan.runtime.guards.places import AttributesByName, ByName, Fixed, Found
from rematplan.runtime.guards.snapshots import PLAIN, is_data, kept, parts_of, unchanged

_SEEDING = frozenset(getattr(owner, name) for owner, name in seeding_functions())
_UNNAMED = frozenset({"__call__", "forward", "backward", "setup_context"})
"""Methods that are called without being named."""
_NOT_OF_CALLS = frozenset(
    f"__{name}__"
    for name in (
        "init",
        "new",
        "init_subclass",
        "repr",
        "str",
        "del",
        "copy",
        "deepcopy",
        "reduce",
        "reduce_ex",
    )
)
"""Special methods that a forward's operators on an object do not call."""
_REPLACED = frozenset({"__getattribute__", "__getattr__", "__setattr__"})
"""Methods of records that `attributes.reads_of` replaces while a forward is traced."""
_TESTS = frozenset({"hasattr", "getattr"})
_MAKING = frozenset({"__init__", "__new__", "__post_init__"})
_ENVIRONMENT = frozenset({"environ", "getenv"})
"""Names whose use means that code reads environment variables."""


@dataclass
class _Shelf:
    """The values to which code refers in one namespace."""

    holder: Any
    """The object that has the namespace."""
    values: Mapping[str, Any]
    """The namespace."""
    found: dict[str, Any] = field(default_factory=dict)
    """The values by name."""
    variables: bool = True
    """Whether the values are those of variables or attributes, and not the items of a dictionary."""
    named: bool = True
    """Whether code that was examined reads them by these names; not true of the arguments of library functions."""
    wanted: set[str] = field(default_factory=set)
    """The names that code may look up, of global variables and of attributes of objects."""
    absent: set[str] = field(default_factory=set)
    """The wanted names that are missing: of global variables, and of attributes that the class has or a string names
    (``hasattr``)."""


class GlobalReads:
    """All values outside of a model's modules to which the code of their forwards refers, looked up when this is made.
    The model's own hooks are left out: they run outside of its plan. ``arguments``: the leaves of the forward's
    arguments, whose objects count too."""

    def __init__(self, modules: Sequence[nn.Module], arguments: Sequence[Any] = ()) -> None:
        """Look up all these values now, from the classes, attributes and hooks of ``modules`` on, and in what is found,
        until nothing new is met."""
        self.shelves: dict[int, _Shelf] = {}
        self.waiting: list[tuple[Any, Names]] = []
        self.met: set[tuple[int, Names]] = set()
        self.names: Names = frozenset()  # all names in the code that was examined
        self.codes: dict[CodeType, None] = {}
        """The code of the functions that were examined."""
        self.containers: list[Any] = [arguments]
        """Containers met, and the arguments. Objects in them have other names in code that reads their attributes."""
        self.generators: dict[int, Any] = {}
        """By id, the random number generators that the code refers to."""
        self.walked = {
            id(vars(module)) for module in modules
        }  # of their attributes, which a planned module shares with its model
        self.kinds = dict.fromkeys(map(type, modules))
        self.own = packages_of(modules)
        for kind in self.kinds:
            self._meet(kind, _UNNAMED)
            for home in kind.__mro__:
                for value in vars(home).values() if not self._is_library(home.__module__) else ():
                    if hasattr(type(value), "__get__") and not self._is_library(type(value).__module__):
                        self._meet(value, _UNNAMED)  # a descriptor of the user's
        values = [v for module in modules for name, v in vars(module).items() if name not in BOOKKEEPING]
        hooks = [hook for module in modules[1:] for kind in HOOKS for hook in vars(module)[kind].values()]
        for value in (*values, *hooks):
            self._meet(value, _UNNAMED)
        self.containers += values
        while self.waiting:
            self._follow()
            containers, self.containers = self.containers, []
            # A function that is no method of theirs may read attributes of the modules' classes, too.
            for thing in (*self.kinds, *[part for one in containers for part in parts_of(one)]):
                self._meet(thing, self.names)
        self._note_absent()

    def _follow(self) -> None:
        """Examine all waiting objects: note, by namespace, the values of the names that code wants, and let these be
        examined, too."""
        while self.waiting:
            thing, names = self.waiting.pop()
            for holder, values, wanted, named in self._places(thing, names):
                if type(values) is dict and ("__builtins__" in values or self._is_object(holder)):
                    shelf = self.shelves.setdefault(id(holder), _Shelf(holder, values))
                    shelf.wanted |= wanted
                for name in wanted & values.keys():
                    self._note(thing, holder, values, name, named)

    def _note_absent(self) -> None:
        """Record which names objects do not have themselves: an attribute that is set later hides the class's. Record
        global variables that do not exist yet, too."""
        testing = (code for code in self.codes if not _TESTS.isdisjoint(code.co_names))
        tested = {name for code in testing for name in strings_in(code) if name.isidentifier()}
        for shelf in self.shelves.values():
            if shelf.holder is shelf.values:
                found = {name for name in shelf.wanted if name.isidentifier()} - vars(builtins).keys()
            else:
                inherited = {name for home in type(shelf.holder).__mro__ for name in vars(home)}
                found = shelf.wanted & (inherited | tested) - BOOKKEEPING - _REPLACED
            shelf.absent = found - shelf.values.keys()

    def found_in_places(
        self, model: str, guarded: Mapping[int, Set[str]], unguarded: Mapping[int, Set[str]]
    ) -> list[Found]:
        """Return the values to which the code refers, from before the forward, as one `Found` for each namespace.
        Values that the forward of ``model`` changed are left out, with a warning. By the id of a namespace, names in
        ``unguarded`` are left out without a warning; those in ``guarded`` get their present values."""
        found, changed = [], set[str]()
        for shelf in self.shelves.values():
            out, whole = unguarded.get(id(shelf.values), ()), guarded.get(id(shelf.values), ())
            before = {
                name: kept(shelf.values[name]) if name in whole else value
                for name, value in shelf.found.items()
                if name not in out
            }
            objects, copies = unchanged(before, shelf.values)
            absent = tuple(n for n in shelf.absent if n not in shelf.values and n not in out)
            if objects or copies or absent:
                found.append(Found(Fixed(shelf.values), objects, copies, absent))
            changed |= before.keys() - objects.keys() - copies.keys()
        if changed:
            warn(f"the forward of {model} sets {', '.join(sorted(changed))}, which a planned one does not")
        return found

    def _note(self, thing: Any, holder: Any, values: Mapping[str, Any], name: str, named: Names) -> None:
        """Record the value ``name`` of a ``holder``'s namespace, which code reaches through ``thing``; Python modules
        and names of `_REPLACED` are not recorded. What the value refers to by the names ``named`` is examined later."""
        value = values[name]
        # A registry may grow, so only the keys that the code names are compared.
        registry = isinstance(value, dict) and not is_data(value)
        if not isinstance(value, ModuleType):
            shelf = self.shelves.setdefault(id(holder), _Shelf(holder, values))
            shelf.variables = shelf.variables and thing is not values
            function = _inside(thing)
            hidden = function is not None and self._is_library(function.__module__)
            shelf.named = shelf.named and not hidden
            if name not in _REPLACED:
                shelf.found.setdefault(name, value if registry else kept(value))
        self._meet(value, named)
        if isinstance(value, (list, tuple, set, frozenset, deque, np.ndarray)):
            self.containers.append(value)
        function = _inside(value) if isinstance(thing, type) or self._is_object(thing) else None
        if function:  # a method refers to other methods of its object
            self._meet(thing, named_in(function.__code__))

    def _meet(self, thing: Any, names: Names) -> None:
        """Let an object be examined once for these ``names``. Random number generators are noted in `generators`,
        seeding functions in ``names``."""
        if isinstance(thing, GENERATORS):
            self.generators[id(thing)] = thing
        if thing is torch.default_generator:
            self.names |= {"default_generator"}  # found in a variable
        if isinstance(thing, FunctionType) and thing in _SEEDING:
            self.names |= {"default_generator", thing.__name__}
        if (id(thing), names) not in self.met:
            self.met.add((id(thing), names))
            self.waiting.append((thing, names))

    def _places(self, thing: Any, names: Names) -> Iterator[tuple[Any, Mapping[str, Any], Names, Names]]:
        """Yield each namespace that code reaches through an object: its holder, its values, the names wanted of it, and
        the names to follow in what is found. Of a function that is no library's, code and names are noted; objects
        bound to it are examined later."""
        own: Names = _UNNAMED
        if function := _inside(thing):
            own = named_in(function.__code__)
            if not self._is_library(function.__module__):
                self.names |= own
                self.codes[function.__code__] = None
                yield function.__globals__, function.__globals__, variables_in(function.__code__), own
                if _ENVIRONMENT & own:
                    named = (function.__globals__.get(name) for name in own)
                    texts = {*strings_in(function.__code__), *(one for one in named if isinstance(one, str))}
                    variables = ByName(filter(str.isidentifier, texts), _variable)
                    yield function.__code__, variables, variables.names, own
                yield function.__dict__, function.__dict__, names, names
                defaults = _defaults(function)
                yield function, defaults, frozenset(defaults), own
            if cells := function.__closure__:
                names_of_cells = zip(function.__code__.co_freevars, cells, strict=True)
                contents = AttributesByName({name: (cell, "cell_contents") for name, cell in names_of_cells})
                yield cells, contents, contents.names, own
        for part in _bound(thing):
            self._meet(part, own)
        if isinstance(thing, weakref.ReferenceType):
            self._meet(thing(), names)
        if isinstance(thing, partial):
            yield thing, thing.keywords, frozenset(thing.keywords), own
            given = _positional(thing)
            yield thing.args, given, frozenset(given), own
        if isinstance(thing, ModuleType):
            if not self._is_library(thing.__name__):
                yield thing, vars(thing), names, names
            return
        if isinstance(thing, (dict, MappingProxyType)):
            yield thing, thing, names, names
        elif isinstance(thing, ContextVar):
            yield thing, ByName(["value"], lambda _: _current(thing)), frozenset({"value"}), names
        elif isinstance(thing, nn.Module):  # outside the model
            if id(vars(thing)) in self.walked or isinstance(thing, torch.jit.ScriptModule):
                return  # a scripted module's settings are in its compiled code
            function = _inside(getattr_static(type(thing), "forward"))
            settings = named_in(function.__code__) if function else names
            yield thing, vars(thing), settings - BOOKKEEPING | settings & {"training"}, names
            yield thing._modules, thing._modules, frozenset(thing._modules), names
        elif self._is_object(thing):
            yield thing, vars(thing) if hasattr(thing, "__dict__") else _slots(thing), names, names
        elif not isinstance(thing, type):
            return
        making: Names = _MAKING if isinstance(thing, type) and thing not in self.kinds else frozenset()
        for home in (*(thing.__mro__ if isinstance(thing, type) else ()), *type(thing).__mro__):
            if not self._is_library(home.__module__):
                further = frozenset[str]() if is_library(home.__module__, ()) else making | _special(home)
                yield home, vars(home), names | _UNNAMED | further, names

    def _is_object(self, thing: Any) -> bool:
        """Return whether an object's attributes are recorded: those of a record, of thread-local data, and of an
        instance of a class outside of libraries. Modules, tensors and classes are left out."""
        if is_record(thing) or isinstance(thing, (type, nn.Module, torch.Tensor)):
            return is_record(thing)
        if isinstance(thing, threading.local):
            return True
        kind = type(thing)
        return not self._is_library(kind.__module__) and (
            hasattr(thing, "__dict__") or hasattr(kind, "__slots__")
        )

    def _is_library(self, module: str | None) -> bool:
        return is_library(module, self.own)


def _special(home: type) -> Names:
    """Return the special methods that a class defines in Python, which operators call: ``__len__``, ``__get__``.
    Those that `dataclasses` generates read every field and are left out."""
    functions = {name: value for name, value in vars(home).items() if isinstance(value, FunctionType)}
    written = (name for name, value in functions.items() if value.__code__.co_filename != "<string>")
    return frozenset(name for name in written if name[:2] == name[-2:] == "__") - _NOT_OF_CALLS


def _current(variable: ContextVar[Any]) -> Any:
    try:
        return variable.get()
    except LookupError:
        return None


def _defaults(function: FunctionType) -> dict[str, Any]:
    """Return the default arguments of a function that are not of plain immutable types, by name."""
    code, values = function.__code__, function.__defaults__ or ()
    names = code.co_varnames[code.co_argcount - len(values) : code.co_argcount]
    every = {**dict(zip(names, values, strict=True)), **(function.__kwdefaults__ or {})}
    return {name: value for name, value in every.items() if type(value) not in PLAIN}


def _positional(bound: partial[Any]) -> dict[str, Any]:
    """Return the positional arguments of a partial function that are not of plain immutable types, by the names of its
    parameters."""
    function, is_method = _inside(bound.func), isinstance(bound.func, MethodType)
    names = function.__code__.co_varnames[is_method : function.__code__.co_argcount] if function else ()
    every = zip_longest(names[: len(bound.args)], bound.args, fillvalue="")
    return {name or f"argument {at}": v for at, (name, v) in enumerate(every) if type(v) not in PLAIN}


def _variable(name: str) -> str | None:
    """Return an environment variable's text, as the same object while it is unchanged; None if the variable is not
    set."""
    # `os.environ` makes a new string at each access, and changes are found by identity.
    text = os.environ.get(name)
    return None if text is None else sys.intern(text)


def slot_names(kind: type) -> list[str]:
    """Return the names of the attributes that objects of a class keep in ``__slots__``."""
    names: list[str] = copyreg._slotnames(kind)  # type: ignore[attr-defined]
    return names


def _slots(holder: Any) -> AttributesByName:
    """Return the attributes that an object keeps in ``__slots__``, by name."""
    return AttributesByName({name: (holder, name) for name in slot_names(type(holder))})


_AROUND = {
    MethodType: "__func__",
    staticmethod: "__func__",
    classmethod: "__func__",
    property: "fget",
    cached_property: "func",
    partial: "func",
    type(cache(len)): "__wrapped__",
}
"""By the type of a callable, the attribute that has the function it wraps."""


def _inside(thing: Any) -> FunctionType | None:
    """Return the Python function that runs if an object is called or a property read, unwrapped, or None."""
    while type(thing) in _AROUND:
        thing = getattr(thing, _AROUND[type(thing)])
    return thing if isinstance(thing, FunctionType) else None


_WRAPPER: Any = type((1).__add__)
"""The type of special methods of C, bound to an object."""


def _bound(thing: Any) -> tuple[Any, ...]:
    """Return what a bound method or partial function has bound: the instance, or the function and arguments. Return the
    setter and deleter of a property, and nothing for other objects."""
    if isinstance(thing, (MethodType, BuiltinMethodType, _WRAPPER)):
        return (thing.__self__,)
    if isinstance(thing, property):
        return (thing.fset, thing.fdel)
    return (thing.func, *thing.args, *thing.keywords.values()) if isinstance(thing, partial) else ()
