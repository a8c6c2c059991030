"""Which arguments a Triton kernel may write into, by its source. What is not understood counts as written."""

from __future__ import annotations

import ast
import inspect
import sys
import textwrap
from collections.abc import Iterator, Mapping
from types import FunctionType
from typing import Any

STORES = frozenset(
    {
        *("store", "make_store", "scatter", "experimental_descriptor_store"),
        *(f"atomic_{name}" for name in ("add", "and", "cas", "max", "min", "or", "store", "xchg", "xor")),
    }
)
"""Names of Triton's functions, and of methods, that write to the address that is their first argument or object."""
LOADS = frozenset({"load", "gather", "experimental_descriptor_load"})
"""Names of those that return the content of an address."""
KINDS = ("tensor", "tensor_descriptor", "dtype", "pointer_type", "constexpr", "tuple")
"""Names of Triton's classes of values. Methods that none of them has are of users' classes."""
OPAQUE = frozenset({"inline_asm_elementwise", "device_print", "call", "extern_elementwise"})
"""Names of Triton's functions that may do anything with their arguments."""

_Names = frozenset[str]
_NONE: _Names = frozenset()


def python_function(kernel: Any) -> FunctionType | None:
    """Return the Python function of a kernel, which wrappers such as autotuners hold as ``fn``, or None."""
    while kernel is not None and not inspect.isfunction(kernel):
        kernel = getattr(kernel, "fn", None)
    return kernel


def written_parameters(function: FunctionType) -> _Names:
    """Return the names of a kernel's parameters through which it, or a function that it calls, may write."""
    return _Reading(function, {}).written()


class _Reading:
    """Follows, without regard to order, from which parameters each variable of a kernel may get an address."""

    def __init__(self, function: FunctionType, known: dict[FunctionType, _Names]) -> None:
        self.function, self.known = function, known
        self.parameters = tuple(inspect.signature(function).parameters)
        self.of: dict[str, _Names] = {name: frozenset({name}) for name in self.parameters}
        self.found: set[str] = set()

    def written(self) -> _Names:
        """Return the parameters through which the function may write; all if its source is not found."""
        if self.function in self.known:
            return self.known[self.function]
        self.known[self.function] = frozenset(self.parameters)  # of a function that calls itself
        try:
            (tree,) = ast.parse(textwrap.dedent(inspect.getsource(self.function))).body
        except (OSError, SyntaxError):
            return self.known[self.function]
        assert isinstance(tree, ast.FunctionDef)
        self.names = _names_seen_by(self.function)
        before = None
        while before != (self.of, self.found):
            before = dict(self.of), set(self.found)
            for statement in tree.body:
                self._follow(statement)
        self.known[self.function] = frozenset(self.found)
        return self.known[self.function]

    def _follow(self, node: ast.AST) -> _Names:
        """Note what a statement or expression writes, and return from which parameters its value may be an address."""
        if isinstance(node, ast.Name):
            return self.of.get(node.id, _NONE)
        if isinstance(node, ast.Call):
            return self._call(node)
        if isinstance(node, ast.Attribute) and node.attr == "dtype":
            return _NONE
        followed = {child: self._follow(child) for child in ast.iter_child_nodes(node)}
        value = followed[node.iter] if isinstance(node, ast.For) else _NONE.union(*followed.values())
        for target in _targets(node):
            self.of[target] = self.of.get(target, _NONE) | value
        return value

    def _call(self, node: ast.Call) -> _Names:
        """Note what a call writes, and return from which parameters its result may be an address. An unknown function
        may write through all its arguments."""
        given: dict[int | str | None, _Names] = {at: self._follow(arg) for at, arg in enumerate(node.args)}
        given |= {keyword.arg: self._follow(keyword.value) for keyword in node.keywords}
        every = _NONE.union(*given.values())
        called = self._resolved(node.func)
        if called is None and isinstance(node.func, ast.Attribute):  # a method of a value
            every |= self._follow(node.func.value)
            if not _is_of_a_value(node.func.attr):
                self.found |= every
            return self._tritons(node.func.attr, every, every)
        inner = python_function(called)
        if str(getattr(inner or called, "__module__", "")).startswith("triton."):
            address = given.get(0, _NONE) | given.get("pointer", _NONE)
            return self._tritons(getattr(called, "__name__", ""), address, every)
        if (
            inner is not None
            and inner is not called
            and not any(isinstance(a, ast.Starred) for a in node.args)
        ):
            reading = _Reading(inner, self.known)
            for name in reading.written():
                at = reading.parameters.index(name)
                self.found |= given.get(at, _NONE) | given.get(name, _NONE) | given.get(None, _NONE)
        elif not (inspect.isbuiltin(called) or isinstance(called, type)):
            self.found |= every
        return every

    def _tritons(self, name: str, address: _Names, every: _Names) -> _Names:
        """Note what a function or method of Triton writes, and return from which parameters its result may be an
        address. ``address``: the parameters of what it would write to; ``every``: those of all arguments."""
        if name in STORES:
            self.found |= address
        elif name in OPAQUE:
            self.found |= every
        return _NONE if name in STORES | LOADS else address | every

    def _resolved(self, node: ast.expr) -> Any:
        """Return the object that an expression such as ``tl.load`` names; None if it names no object known before the
        call, such as a method of a variable."""
        if isinstance(node, ast.Name):
            return None if node.id in self.of else self.names.get(node.id)
        if isinstance(node, ast.Attribute):
            return getattr(self._resolved(node.value), node.attr, None)
        return None


def _names_seen_by(function: FunctionType) -> Mapping[str, Any]:
    seen = inspect.getclosurevars(function)
    return {**seen.builtins, **function.__globals__, **seen.nonlocals}


def _is_of_a_value(method: str) -> bool:
    core = sys.modules["triton.language.core"]
    return any(hasattr(getattr(core, kind, None), method) for kind in KINDS)


def _targets(node: ast.AST) -> Iterator[str]:
    """Yield the names to which a statement or expression assigns."""
    targets: list[ast.expr] = getattr(node, "targets", None) or [getattr(node, "target", None)]
    targets += [item.optional_vars for item in getattr(node, "items", ()) if item.optional_vars]
    for target in targets:
        for inner in ast.walk(target) if target is not None else ():
            if isinstance(inner, ast.Name):
                yield inner.id
