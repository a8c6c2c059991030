"""The names that a code object mentions, and whether a module is library code."""

from __future__ import annotations

import dis
import site
import sys
from collections.abc import Collection, Iterable, Iterator
from functools import cache
from pathlib import Path
from types import CodeType
from typing import Any

Names = frozenset[str]

_NETWORKS = "rematplan.models"
"""This package's only modules with networks to plan."""

_SITES = (*site.getsitepackages(), site.getusersitepackages())
"""The folders in which Python installs packages."""
_OF_VARIABLES = frozenset({"LOAD_GLOBAL", "STORE_GLOBAL", "LOAD_NAME"})
"""Bytecode instructions that name global variables."""


@cache
def named_in(code: CodeType) -> Names:
    """Return the attributes, globals and strings that a code object and its nested functions mention."""
    inner = (named_in(const) for const in code.co_consts if isinstance(const, CodeType))
    return frozenset(code.co_names).union(strings_in(code), *inner)


@cache
def variables_in(code: CodeType) -> Names:
    """Return the globals that a code object and its nested functions read or set; of code that calls ``globals()``, all
    strings, too."""
    inner = (variables_in(const) for const in code.co_consts if isinstance(const, CodeType))
    named = (i.argval for i in dis.get_instructions(code) if i.opname in _OF_VARIABLES)
    looked_up = strings_in(code) if "globals" in code.co_names else ()
    return frozenset(named).union(looked_up, *inner)


def strings_in(code: CodeType) -> Names:
    """Return the string constants of a code object, those in constant tuples and sets included, without those of nested
    functions."""
    return frozenset(_strings(code.co_consts))


def _strings(constants: Iterable[object]) -> Iterator[str]:
    for constant in constants:
        if isinstance(constant, str):
            yield constant
        elif isinstance(constant, (tuple, frozenset)):
            yield from _strings(constant)


def packages_of(things: Iterable[Any]) -> Names:
    """Return the names of the top-level packages that define the classes of these objects, except torch."""
    return frozenset(type(thing).__module__.partition(".")[0] for thing in things) - {"torch"}


def is_library(module: str | None, own: Collection[str]) -> bool:
    """Return whether a Python module is of PyTorch, Python's library, an installed package or this one, whose functions
    guards ignore. ``own``: names of packages that count as the user's; of this package, that holds for its networks
    only."""
    module = module or "builtins"
    package = module.partition(".")[0]
    if package == "rematplan" and not module.startswith(_NETWORKS):
        return True
    if package in own:
        return False
    file = getattr(sys.modules.get(package), "__file__", None) or ""
    if package in sys.stdlib_module_names or package in ("torch", "rematplan"):
        return True
    return file.startswith(_SITES) or (bool(file) and _is_installed(file))


@cache
def _is_installed(file: str) -> bool:
    """Return whether a package with this file is in a folder with metadata of installed packages, as ``pip install
    --target`` leaves them in a folder of the user's."""
    folder = Path(file).parent
    return any((folder.parent if Path(file).stem == "__init__" else folder).glob("*.dist-info"))
