"""Sizes as expressions of a batch's sizes, compiled into one function.

Only integer arithmetic is allowed: PyTorch rearranges expressions over floating-point numbers, so that they
may round to another size than the model's arithmetic does.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch.fx.experimental.symbolic_shapes import SYMPY_INTERP

from rematplan.ir import ModelError
from rematplan.runtime.graph.compat import PythonPrinter, pytree

WHOLE = frozenset(
    {
        *("Symbol", "Integer", "Zero", "One", "NegativeOne", "Add", "Mul", "Pow", "PowByNatural"),
        *("FloorDiv", "CleanDiv", "Mod", "PythonMod", "ModularIndexing", "Max", "Min"),
        *("Equality", "Unequality", "StrictLessThan", "LessThan", "StrictGreaterThan", "GreaterThan"),
        *("And", "Or", "Not", "BooleanTrue", "BooleanFalse", "IsNonOverlappingAndDenseIndicator"),
    }
)
"""The names of the classes of which an expression may consist: they are exact on integers and truth
values."""
PRINTER = PythonPrinter()
SYMBOLIC = (torch.SymInt, torch.SymFloat, torch.SymBool)


class NotSymbolic(ModelError):
    """Raised if a step cannot be captured with open sizes. The message has the reason."""


@dataclass(frozen=True, slots=True)
class OpenSize:
    """A size that depends on the batch's sizes: its position in an `ExpressionTable`."""

    at: int


@dataclass
class ExpressionTable:
    """The expressions of a step, each once. ``symbols``: the names of the batch's sizes on which they depend,
    in order."""

    symbols: tuple[str, ...]
    expressions: dict[Any, int] = field(default_factory=dict)

    def add(self, size: Any) -> int | OpenSize:
        """Return a size as an integer, or as its position in the table.

        Raises:
            NotSymbolic: it is not an integer, or depends on something other than the batch's sizes.
        """
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
        """Return a function from the batch's sizes, in the order of ``symbols``, to the values of all
        expressions."""
        body = "".join(f"{PRINTER.doprint(e)}, " for e in self.expressions)
        source = f"lambda {', '.join(self.symbols)}: ({body})"
        return eval(compile(source, "<sizes of a step>", "eval"), dict(SYMPY_INTERP))  # type: ignore[no-any-return]


def condition(assumed: Sequence[Any], symbols: Sequence[str]) -> Callable[..., bool]:
    """Return a function of the values of ``symbols`` that says whether all assumptions about them are true.

    Raises:
        NotSymbolic: an assumption depends on arithmetic that may round.
    """
    for one in assumed:
        check_whole(one)
    body = " and ".join(f"bool({PRINTER.doprint(one)})" for one in assumed) or "True"
    source = f"lambda {', '.join(symbols)}: {body}"
    return eval(compile(source, "<condition of sizes>", "eval"), dict(SYMPY_INTERP))  # type: ignore[no-any-return]


def check_whole(expression: Any) -> None:
    """Refuse an expression that may round.

    Raises:
        NotSymbolic: a part of it is not in `WHOLE`.
    """
    todo = [expression]
    while todo:
        part = todo.pop()
        if type(part).__name__ not in WHOLE:
            raise NotSymbolic(f"it computes with sizes in a way that may round ({type(part).__name__})")
        todo += part.args


def opened(given: Any, add: Callable[[Any], int | OpenSize]) -> Any:
    """Return nested arguments with ``add(size)`` in place of each symbolic size: an integer or an open size
    (`ExpressionTable.add`)."""
    return pytree.tree_map_only(SYMBOLIC, add, given)


def resolved(given: Any, sizes: Sequence[int]) -> Any:
    """Return nested arguments with an integer in place of each `OpenSize`.

    ``sizes``: the values of all expressions of the `ExpressionTable` in which the open sizes are positions.
    """
    if isinstance(given, OpenSize):
        return sizes[given.at]
    if isinstance(given, (tuple, list)):
        return type(given)(resolved(g, sizes) for g in given)
    if isinstance(given, Mapping):
        return {key: resolved(g, sizes) for key, g in given.items()}
    return given


def has_open(given: Iterable[Any]) -> bool:
    """Return whether nested arguments contain an open size."""
    return any(isinstance(leaf, OpenSize) for leaf in pytree.tree_leaves(given))
