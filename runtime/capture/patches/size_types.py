"""What a model learns of a symbolic size's type: ``isinstance`` and ``len`` as of a number, but comparing
``type(...)`` is refused."""

from __future__ import annotations

import builtins
import dis
import sys
from collections.abc import Collection, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from functools import cache
from inspect import unwrap
from threading import get_ident
from types import CellType, CodeType, FunctionType, MethodType, ModuleType
from typing import Any

import torch
from torch import nn

from rematplan.runtime.guards.bytecode import is_library, named_in, packages_of
from rematplan.runtime.symbols.expressions import NotSymbolic

_NUMBERS: dict[type, int | float] = {torch.SymInt: 0, torch.SymFloat: 0.0, torch.SymBool: False}
"""By the class of a symbolic size, a number of the class that it has in eager mode."""
_METHODS = (staticmethod, classmethod, MethodType)
_COMPARISONS = frozenset({"IS_OP", "COMPARE_OP", "CONTAINS_OP"})
_OPERANDS = ("LOAD_", "BUILD_", "PRECALL", "CALL", "PUSH_NULL")
"""How the names of instructions begin that only compute what is compared."""


@contextmanager
def sizes_have_plain_types(model: nn.Module) -> Iterator[None]:
    """Inside the block, let ``isinstance`` answer for a symbolic size as for a number, and ``len`` of a tensor return a
    symbol. This holds in this thread and the model's packages, by global variables. Raises `NotSymbolic` if code
    compares types."""
    modules, tracing = tuple(model.modules()), get_ident()
    own = packages_of(modules)
    functions = tuple(_functions(modules, own))
    if any(_compares_type(function.__code__) for function in functions):
        raise NotSymbolic("it compares the type of a value with int, and a size may be such a value")

    def plain_isinstance(thing: Any, kinds: Any) -> bool:
        if type(thing) in _NUMBERS and get_ident() == tracing:
            thing = _NUMBERS[type(thing)]
        return builtins.isinstance(thing, kinds)

    def open_len(thing: Any) -> Any:
        """Return the length. The builtin would make an integer of a symbolic size, and so fix the size."""
        if builtins.isinstance(thing, torch.Tensor) and thing.ndim and get_ident() == tracing:
            return thing.shape[0]
        return builtins.len(thing)

    given = {"isinstance": plain_isinstance, "len": open_len}
    imported = [vars(m) for m in tuple(sys.modules.values()) if isinstance(m, ModuleType)]
    with ExitStack() as stack:
        for space in (*imported, *(function.__globals__ for function in functions)):
            if is_library(space.get("__name__"), own):
                continue
            for name in given.keys() - space.keys():
                space[name] = given[name]
                stack.callback(space.pop, name, None)
        yield


def _functions(modules: Sequence[nn.Module], own: Collection[str]) -> Iterator[FunctionType]:
    """Yield functions that forwards may call, without library code: in attributes and closures, or named by code."""
    kinds = [vars(kind) for kind in dict.fromkeys(k for module in modules for k in type(module).__mro__)]
    waiting = [held[name] for held in kinds for name in ("forward", "__call__") if name in held]
    waiting += [value for module in modules for value in tuple(vars(module).values())]
    met = set[CodeType]()
    while waiting:
        value = waiting.pop()
        function = value.fget if isinstance(value, property) else value
        function = function.__func__ if isinstance(function, _METHODS) else function
        function = unwrap(function) if isinstance(function, FunctionType) else function
        if not isinstance(function, FunctionType) or function.__code__ in met:
            continue
        met.add(function.__code__)
        if is_library(function.__module__, own):
            continue
        yield function
        waiting += [cell.cell_contents for cell in function.__closure__ or () if cell != CellType()]
        names = named_in(function.__code__)
        waiting += [held[name] for held in (*kinds, function.__globals__) for name in names & held.keys()]


@cache
def _compares_type(code: CodeType) -> bool:
    """Return whether a code object, nested functions included, calls ``type`` and compares something with ``int``."""
    if any(_compares_type(inner) for inner in code.co_consts if isinstance(inner, CodeType)):
        return True
    if not {"type", "int"} <= set(code.co_names):
        return False
    between = False  # only operands since int was loaded
    for step in dis.get_instructions(code):
        if between and step.opname in _COMPARISONS:
            return True
        between = (between and step.opname.startswith(_OPERANDS)) or (
            step.opname == "LOAD_GLOBAL" and step.argval == "int"
        )
    return False
