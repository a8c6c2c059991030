"""Numbers that a forward counts with, such as a step counter, as expressions of the numbers that it found.

A trace gets a number that records what is computed from it, and outcomes of comparisons. A guard evaluates these
again, and a planned call stores the new number.
"""

from __future__ import annotations

import operator
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from rematplan.runtime.guards.places import Attributes, Place

Expression = Any
"""A number, a `Variable`, or a tuple (function, expressions of its arguments)."""


@dataclass(frozen=True, slots=True, eq=False)
class Variable:
    """A number that a forward finds: a place (namespace) and the number's name in it. Variables are compared by
    identity."""

    place: Place
    name: str

    def found(self, attributes: Attributes) -> Any:
        """Return the value that the place has now. ``attributes``: the ``__dict__`` of each module, by position."""
        return self.place.find(attributes)[self.name]


def evaluated(expression: Expression, attributes: Attributes) -> Any:
    """Return the value of an expression now. ``attributes``: the ``__dict__`` of each module, by position."""
    if isinstance(expression, Variable):
        return expression.found(attributes)
    if type(expression) is tuple:
        function, *arguments = expression
        return function(*(evaluated(one, attributes) for one in arguments))
    return expression


def variables_of(expression: Expression) -> set[Variable]:
    """Return the variables in an expression."""
    if isinstance(expression, Variable):
        return {expression}
    parts = expression[1:] if type(expression) is tuple else ()
    return {variable for part in parts for variable in variables_of(part)}


@dataclass(frozen=True, slots=True, eq=False)
class Comparison:
    """A comparison of counted numbers, and the outcome that it had when the forward was traced."""

    expression: Expression
    outcome: bool

    def holds(self, attributes: Attributes) -> bool:
        """Return whether the comparison has the same outcome now. ``attributes``: the ``__dict__`` of each module."""
        return bool(evaluated(self.expression, attributes)) == self.outcome


@dataclass
class Counting:
    """What the present trace of a forward has done with counted numbers."""

    comparisons: list[Comparison] = field(default_factory=list)
    """The comparisons of counted numbers, in order."""
    revealed: set[Variable] = field(default_factory=set)
    """The variables on whose values the graph may depend in any way."""

    def reveal(self, expression: Expression) -> None:
        """Record that the graph may depend on the value of an expression in any way."""
        self.revealed |= variables_of(expression)

    def number(self, value: Any, expression: Expression) -> Any:
        """Return a number that equals an int or float ``value`` and records its own use. Return any other value itself,
        and reveal the variables of ``expression``."""
        kind = _KINDS.get(type(value))
        if kind is None:
            self.reveal(expression)
            return value
        counted = kind(value)
        counted.counting, counted.expression = self, expression
        return counted


class _Counted:
    counting: Counting
    expression: Expression


class CountedInt(_Counted, int):
    """An integer that records what a forward does with it."""

    __hash__ = int.__hash__


class CountedFloat(_Counted, float):
    """A floating-point number that records what a forward does with it."""

    __hash__ = float.__hash__


_KINDS: dict[type, Any] = {int: CountedInt, float: CountedFloat}


def plain(value: Any) -> Any:
    """Return the plain number that a counted number equals; any other value as it is."""
    if isinstance(value, CountedInt):
        return int(value)
    return float(value) if isinstance(value, CountedFloat) else value


def expression_of(value: Any) -> Expression:
    """Return how a counted number was computed; any other value as it is."""
    return value.expression if isinstance(value, _Counted) else value


def _computing(function: Callable[..., Any]) -> Callable[..., Any]:
    def method(self: _Counted, *others: Any) -> Any:
        """Return a counted number if all operands are plain or counted; else reveal the counted ones and return a plain
        result. NotImplemented if an operand is a `ReadNumber`, which then computes."""
        if any(getattr(type(other), "reads_tensors", False) for other in others):
            return NotImplemented  # the other number computes
        if not all(type(plain(other)) in (int, float, bool) for other in others):
            for one in (self, *others):
                self.counting.reveal(expression_of(one))
            return function(plain(self), *others)
        expression = (function, *map(expression_of, (self, *others)))
        return self.counting.number(function(*map(plain, (self, *others))), expression)

    return method


def _reflected(function: Callable[..., Any]) -> Callable[..., Any]:
    forward = _computing(lambda right, left: function(left, right))

    def method(self: _Counted, left: Any) -> Any:
        return forward(self, left)

    return method


def _comparing(function: Callable[..., Any]) -> Callable[..., Any]:
    def method(self: _Counted, *others: Any) -> Any:
        """Record a comparison of plain or counted numbers with its outcome, and return that. With another operand,
        reveal this number and compare plainly; NotImplemented if the operand is a `ReadNumber`."""
        if any(getattr(type(other), "reads_tensors", False) for other in others):
            return NotImplemented
        if not all(type(plain(other)) in (int, float, bool) for other in others):
            self.counting.reveal(self.expression)
            return function(plain(self), *others)
        outcome = bool(function(*map(plain, (self, *others))))
        expression = (function, *map(expression_of, (self, *others)))
        self.counting.comparisons.append(Comparison(expression, outcome))
        return outcome

    return method


_BINARY = ("add", "sub", "mul", "truediv", "floordiv", "mod", "pow", "and", "or", "xor", "lshift", "rshift")
for _name in _BINARY:
    _function = getattr(operator, f"{_name}_" if _name in ("and", "or") else _name)
    for _kind in _KINDS.values():
        setattr(_kind, f"__{_name}__", _computing(_function))
        setattr(_kind, f"__r{_name}__", _reflected(_function))
for _name in ("neg", "invert"):
    for _kind in _KINDS.values():
        setattr(_kind, f"__{_name}__", _computing(getattr(operator, _name)))
for _name in ("eq", "ne", "lt", "le", "gt", "ge"):
    for _kind in _KINDS.values():
        setattr(_kind, f"__{_name}__", _comparing(getattr(operator, _name)))
for _kind in _KINDS.values():
    _kind.__bool__ = _comparing(bool)
