"""The sizes of a captured step as integer expressions of the batch's sizes, compiled into one function that computes
them all.

PyTorch rearranges expressions of floating-point numbers, which may then round to another size.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch.fx.experimental.symbolic_shapes import SYMPY_INTERP

from rematplan.ir import ModelError
from rematplan.runtime.graph.captured_step import replaced
from rematplan.runtime.graph.compat import PythonPrinter, pytree
from rematplan.runtime.graph.tracked_sizes import TrackedSize

WHOLE = frozenset(
    {
        *("Symbol", "Integer", "Zero", "One", "NegativeOne", "Add", "Mul", "Pow", "PowByNatural"),
        *("FloorDiv", "CleanDiv", "Mod", "PythonMod", "ModularIndexing", "Max", "Min"),
        *("Equality", "Unequality", "StrictLessThan", "LessThan", "StrictGreaterThan", "GreaterThan"),
        *("And", "Or", "Not", "BooleanTrue", "BooleanFalse", "IsNonOverlappingAndDenseIndicator"),
    }
)
"""The names of the classes of which an expression may consist: they are exact on integers and truth values."""
PRINTER = PythonPrinter()
SYMBOLIC = (torch.SymInt, torch.SymFloat, torch.SymBool)


class NotSymbolic(ModelError):
    """Raised if a step cannot be captured with open sizes, i.e. with sizes that stay expressions of the batch's
    sizes. The message has the reason."""


@dataclass(frozen=True, slots=True)
class OpenSize:
    """A size of a captured step that is an expression of the batch's sizes. ``at``: the position of the expression in
    an `ExpressionTable`."""

    at: int


@dataclass
class ExpressionTable:
    """The expressions that compute the symbolic sizes of a captured step, each once."""

    symbols: tuple[str, ...]
    """The batch's sizes in the expressions, in the order in which `compiled` takes them."""
    expressions: dict[Any, int] = field(default_factory=dict)
    """The position of each SymPy expression in the table."""

    def add(self, size: Any) -> int | OpenSize:
        """Return a constant size as an integer, another as an `OpenSize` of its entry, which may be new;
        `NotSymbolic` if it depends on values or may round."""
        if isinstance(size, (torch.SymFloat, torch.SymBool)):
            raise NotSymbolic("it computes a number that is not an integer from a size")
        if not isinstance(size, torch.SymInt):
            return int(size)
        expression = size.node.expr
        if expression.is_number:
            return int(expression)
        check_whole(expression)
        unknown = {str(s) for s in expression.free_symbols} - set(self.symbols)
        if unknown:
            raise NotSymbolic("a size depends on values of tensors")
        return OpenSize(self.expressions.setdefault(expression, len(self.expressions)))

    def compiled(self) -> Callable[..., tuple[int, ...]]:
        """Return a function from the batch's sizes, in the order of ``symbols``, to the values of all expressions by
        position."""
        return values_of(self.expressions, self.symbols)


def values_of(expressions: Iterable[Any], symbols: Sequence[str]) -> Callable[..., tuple[int, ...]]:
    """Return a function of the values of ``symbols`` that returns the values of ``expressions``, SymPy's or integers,
    as a tuple."""
    body = "".join(f"{PRINTER.doprint(e)}, " for e in expressions)
    source = f"lambda {', '.join(symbols)}: ({body})"
    return eval(compile(source, "<sizes of a step>", "eval"), dict(SYMPY_INTERP))  # type: ignore[no-any-return]


def condition(assumed: Sequence[Any], symbols: Sequence[str]) -> Callable[..., bool]:
    """Return a function of the values of ``symbols`` that returns whether all assumptions are true; `NotSymbolic` if
    one is not of integers."""
    for one in assumed:
        check_whole(one)
    body = " and ".join(f"bool({PRINTER.doprint(one)})" for one in assumed) or "True"
    source = f"lambda {', '.join(symbols)}: {body}"
    return eval(compile(source, "<condition of sizes>", "eval"), dict(SYMPY_INTERP))  # type: ignore[no-any-return]


def check_whole(expression: Any) -> None:
    """Raise `NotSymbolic` if a SymPy expression of sizes may round."""
    for part in parts(expression):
        if type(part).__name__ not in WHOLE:
            raise NotSymbolic(f"it computes with sizes in a way that may round ({type(part).__name__})")


def parts(expression: Any) -> Iterator[Any]:
    """Yield all nodes of the tree of a SymPy expression, a node as often as it occurs."""
    todo = [expression]
    while todo:
        part = todo.pop()
        yield part
        todo += part.args


def opened(given: Any, add: Callable[[Any], int | OpenSize]) -> Any:
    """Return the nested arguments of a call with ``add(size)`` instead of each symbolic size."""
    return pytree.tree_map_only(SYMBOLIC, add, given)


def resolved(given: Any, sizes: Sequence[int]) -> Any:
    """Return the nested arguments of a call with an integer instead of each `OpenSize`."""
    return replaced(given, OpenSize, lambda open_: sizes[open_.at])


def tracked(given: Any, sizes: Sequence[int]) -> Any:
    """Return the nested arguments of a call with a `TrackedSize`, which has the integer of ``sizes``, instead of each
    `OpenSize`."""
    return replaced(given, OpenSize, lambda open_: TrackedSize(sizes[open_.at], open_.at))


def has_open(given: Iterable[Any]) -> bool:
    """Return whether the nested arguments of a call contain an `OpenSize`, a size that depends on the batch's sizes."""
    return any(isinstance(leaf, OpenSize) for leaf in pytree.tree_leaves(given))
