"""Numbers that a traced forward reads from tensors with unknown values, such as a loss for a log.

If the forward only stores, returns or prints one, a planned call evaluates it afterwards. A comparison of drawn
numbers is a decision, which the guard checks; any other use is refused.
"""

from __future__ import annotations

import gc
import operator
import sys
import weakref
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from rematplan.ir import ModelError
from rematplan.runtime.graph.compat import DataDependentOutputException, FakeTensor, FunctionalTensor, pytree
from rematplan.runtime.guards.counted_numbers import Expression, expression_of, plain, variables_of
from rematplan.runtime.guards.tensor_reads import ITEM
from rematplan.runtime.guards.text_uses import TEXT, leaves

Decide = Callable[[Callable[..., Any], Expression, Sequence[torch.Tensor]], Any]
"""A function that returns ``of(expression, tensors)`` for the real tensors, and records it as a decision. It raises
DataDependentOutputException if their values are unknown before the step runs."""


@dataclass(frozen=True, slots=True)
class Leaf:
    """The value of a tensor in an expression. ``at``: the tensor's position in `ReadNumber.tensors`."""

    at: int


NUMBERS: list[weakref.ref[Any]] = []
"""The numbers of the present capture. Captures exclude each other."""


class ReadNumber:
    """A number that a traced forward has read from tensors, or computed from such numbers. ``expression``: how it is
    computed. ``tensors``: what its `Leaf`s refer to. ``decide``: evaluates a comparison, truth value or integer of the
    number, by which the forward decides."""

    reads_tensors = True
    __slots__ = ("__weakref__", "decide", "expression", "tensors")
    __hash__ = None  # type: ignore[assignment]
    __array_ufunc__ = None

    def __init__(self, expression: Expression, tensors: Sequence[Any], decide: Decide) -> None:
        self.expression, self.tensors, self.decide = expression, tuple(tensors), decide
        NUMBERS.append(weakref.ref(self))

    @property  # type: ignore[misc]
    def __class__(self) -> Any:
        return float  # what eager mode gives

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        raise DataDependentOutputException(torch.ops.aten._local_scalar_dense.default)


def check_none_left() -> None:
    """Raise `ModelError` if a number of the trace still exists: the forward left it where no planned call stores it,
    such as in a queue. `NUMBERS` is emptied."""
    if any(number() is not None for number in NUMBERS):
        gc.collect()  # a trace leaves cycles
    left = any(number() is not None for number in NUMBERS)
    NUMBERS.clear()
    if left:
        raise ModelError(
            "the forward gives a number of a tensor (Tensor.item) to an object that a planned call does not change; "
            "store it in an attribute of the module, or return the tensor"
        )


def _refused(*_: Any, **__: Any) -> Any:
    raise DataDependentOutputException(torch.ops.aten._local_scalar_dense.default)


def _text(*_: Any) -> str:
    if leaves(sys._getframe(1)):
        return TEXT
    return str(_refused())


def numbers_of(expression: Expression, tensors: Sequence[torch.Tensor]) -> Expression:
    """Return an expression with the values of tensors in place of each `Leaf`; if it has no variables, return its value
    instead."""
    if isinstance(expression, Leaf):
        return ITEM(tensors[expression.at])
    if type(expression) is not tuple:
        return expression
    function, *arguments = expression
    found = [numbers_of(one, tensors) for one in arguments]
    if any(variables_of(one) for one in found):
        return function, *found
    return function(*found)


def _moved(expression: Expression, by: int) -> Expression:
    if isinstance(expression, Leaf):
        return Leaf(expression.at + by)
    return tuple(_moved(one, by) for one in expression) if type(expression) is tuple else expression


def _combined(function: Callable[..., Any], *parts: Any) -> tuple[Expression, list[Any]] | None:
    """Return the expression of ``function`` applied to ``parts``, and the tensors of its leaves; None if a part is no
    number."""
    expressions: list[Expression] = []
    tensors: list[Any] = []
    for one in parts:
        if type(one) is ReadNumber:
            expressions.append(_moved(one.expression, len(tensors)))
            tensors += one.tensors
        elif type(plain(one)) in (int, float, bool):
            expressions.append(expression_of(one))
        else:
            return None
    return (function, *expressions), tensors


def _computing(function: Callable[..., Any]) -> Callable[..., Any]:
    def method(self: ReadNumber, *others: Any) -> Any:
        found = _combined(function, self, *others)
        return NotImplemented if found is None else ReadNumber(*found, self.decide)

    return method


def _reflected(function: Callable[..., Any]) -> Callable[..., Any]:
    return _computing(lambda right, left: function(left, right))


def _deciding(function: Callable[..., Any]) -> Callable[..., Any]:
    """Return a comparison for read numbers, whose outcome is a recorded decision. It is refused if it depends on
    counted numbers, and NotImplemented for other operands."""

    def method(self: ReadNumber, *others: Any) -> Any:
        found = _combined(function, self, *others)
        if found is None:
            return NotImplemented
        expression, tensors = found
        if variables_of(expression):
            _refused()
        return self.decide(numbers_of, expression, tensors)

    return method


for _name in ("add", "sub", "mul", "truediv", "floordiv", "mod", "pow"):
    setattr(ReadNumber, f"__{_name}__", _computing(getattr(operator, _name)))
    setattr(ReadNumber, f"__r{_name}__", _reflected(getattr(operator, _name)))
_COMPUTING: dict[str, Callable[..., Any]] = {"neg": operator.neg, "abs": abs, "round": round}
_DECIDING: dict[str, Callable[..., Any]] = {"bool": bool, "int": int, "index": operator.index}
for _name in _COMPUTING:
    setattr(ReadNumber, f"__{_name}__", _computing(_COMPUTING[_name]))
for _name in ("eq", "ne", "lt", "le", "gt", "ge"):
    setattr(ReadNumber, f"__{_name}__", _deciding(getattr(operator, _name)))
for _name in _DECIDING:
    setattr(ReadNumber, f"__{_name}__", _deciding(_DECIDING[_name]))
for _name in ("float", "complex", "array", "reduce_ex"):
    setattr(ReadNumber, f"__{_name}__", _refused)
for _name in ("str", "repr", "format"):
    setattr(ReadNumber, f"__{_name}__", _text)


@dataclass(frozen=True, slots=True)
class Counted:
    """A number that a planned call stores, as an expression of the variables that the forward counts with."""

    expression: Expression


def _made(tensors: Any, expression: Expression) -> Any:
    if all(
        isinstance(t, torch.Tensor) and not isinstance(t, (FakeTensor, FunctionalTensor)) for t in tensors
    ):
        found = numbers_of(expression, [t.detach() for t in tensors])
        return Counted(found) if variables_of(found) else found
    return ReadNumber(expression, tensors, _refused)


# A structure must not hold what decides, because that holds the tensors of the trace.
pytree.register_pytree_node(ReadNumber, lambda number: (list(number.tensors), number.expression), _made)


def check_uncounted(values: Any) -> None:
    """Raise DataDependentOutputException if nested values have a number that is computed from both tensors and counted
    variables."""
    for leaf in pytree.tree_leaves(values, is_leaf=lambda one: type(one) is ReadNumber):
        if type(leaf) is ReadNumber and variables_of(leaf.expression):
            _refused()
