"""What a piece of code names, and whose it is."""

from __future__ import annotations

import dis
import site
import sys
from collections.abc import Collection, Iterable
from functools import cache
from types import CodeType
from typing import Any

Names = frozenset[str]

_OURS = tuple(f"rematplan.{part}." for part in ("ir", "planner", "plans", "runtime"))
"""Our modules, those of models apart."""

_SITES = (*site.getsitepackages(), site.getusersitepackages())
"""Where packages are installed."""
_OF_VARIABLES = frozenset({"LOAD_GLOBAL", "STORE_GLOBAL", "LOAD_NAME"})
"""Instructions that name global variables."""


@cache
def named_in(code: CodeType) -> Names:
    """What a code names besides its own variables, keys of dictionaries and the functions within it included."""
    inner = (named_in(const) for const in code.co_consts if isinstance(const, CodeType))
    return frozenset(code.co_names).union(strings_in(code), *inner)


@cache
def variables_in(code: CodeType) -> Names:
    """The global variables that a code reads or sets, the functions within it included; attributes may have the same
    names."""
    inner = (variables_in(const) for const in code.co_consts if isinstance(const, CodeType))
    named = (i.argval for i in dis.get_instructions(code) if i.opname in _OF_VARIABLES)
    looked_up = strings_in(code) if "globals" in code.co_names else ()
    return frozenset(named).union(looked_up, *inner)


def strings_in(code: CodeType) -> Names:
    """The strings that stand in a code."""
    return frozenset(const for const in code.co_consts if isinstance(const, str))


def packages_of(things: Iterable[Any]) -> Names:
    """The packages that the classes of some things are of, PyTorch apart."""
    return frozenset(type(thing).__module__.partition(".")[0] for thing in things) - {"torch"}


def is_library(module: str | None, own: Collection[str]) -> bool:
    """Whether nobody looks into a module's functions: it is PyTorch's, Python's, ours, or installed and of none of
    the model's ``own`` packages; what such go by is theirs, and too much."""
    module = module or "builtins"
    package = module.partition(".")[0]
    if module.startswith(_OURS):
        return True
    if package in own:
        return False
    file = getattr(sys.modules.get(package), "__file__", None) or ""
    return package in sys.stdlib_module_names or package in ("torch", "rematplan") or file.startswith(_SITES)
