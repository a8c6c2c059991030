"""Tests of a forward for infinite and NaN values, such as ``if not torch.isfinite(h).all()``.

A trace assumes that all values are finite, and adds an op that checks it. With another outcome the step stops, and
the call needs a graph of that outcome.
"""

from __future__ import annotations

import math
import operator
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch

from rematplan.ir import ModelError

ATEN = torch.ops.aten


class OtherOutcome(ModelError):
    """A test for infinite and NaN values has another outcome in a step than in the trace of its graph. ``outcomes``:
    those of the forward's tests in order, up to this one."""

    def __init__(self, outcomes: tuple[bool, ...]) -> None:
        self.outcomes = outcomes
        super().__init__(
            f"the forward branches on a test for infinite or NaN values (torch.isfinite, isinf, isnan), its "
            f"{len(outcomes)}. one, and the outcome is now {outcomes[-1]}, for which this step has no graph"
        )


@torch.library.custom_op("rematplan::check_outcome", mutates_args=())
def _check_outcome(condition: torch.Tensor, outcomes: Sequence[bool]) -> torch.Tensor:
    if bool(condition) != outcomes[-1]:
        raise OtherOutcome((*outcomes[:-1], not outcomes[-1]))
    return condition.new_empty(0)


_check_outcome.register_fake(lambda condition, outcomes: condition.new_empty(0))
CHECK_OUTCOME = torch.ops.rematplan.check_outcome.default


class FiniteTests:
    """The tests for infinite and NaN values of a traced forward, and their assumed outcomes: those given, then that
    all is finite."""

    def __init__(self, given: tuple[bool, ...] = ()) -> None:
        self.given = given
        self.begin()

    def begin(self) -> None:
        """Prepare for another trace of the forward."""
        self.outcomes: list[bool] = []
        self._known: dict[int, tuple[torch.Tensor, Any]] = {}

    def note(self, func: Any, args: tuple[Any, ...], result: Any) -> None:
        """If a call tests for infinite or NaN values or combines such tests, record, for its ``result``, what the call
        returns if all values are finite. Forget an earlier record of ``result`` if that is unknown."""
        packet = getattr(func, "overloadpacket", None)
        combining, testing = _OF_TESTS.get(packet), _TESTS.get(packet)
        if combining is None and testing is None:
            return
        values = [self._known.get(id(a), (a, None))[1] if isinstance(a, torch.Tensor) else a for a in args]
        known = None not in (v for a, v in zip(args, values, strict=True) if isinstance(a, torch.Tensor))
        value = None
        if known and combining:
            value = combining(*values)
        elif testing:
            value = testing(*args)
        if value is None:
            self._known.pop(id(result), None)
        else:
            self._known[id(result)] = result, value  # the id is unique while the tensor lives

    def next(self, condition: torch.Tensor) -> list[bool] | None:
        """Assume the outcome of the test ``condition``: the next one given, else that all is finite. Add it to
        `outcomes`, and return these; None, and no outcome, if it is no such test."""
        _, value = self._known.get(id(condition), (None, None))
        if value is None:
            return None
        at = len(self.outcomes)
        self.outcomes.append(self.given[at] if at < len(self.given) else bool(value))
        return list(self.outcomes)


def _is_infinite(number: Any) -> bool:
    return isinstance(number, float) and math.isinf(number)


def _never(*_: Any) -> bool:
    return False


_TESTS: Mapping[Any, Callable[..., bool | None]] = {
    ATEN.isnan: _never,
    ATEN.isinf: _never,
    ATEN.isposinf: _never,
    ATEN.isneginf: _never,
    # `isfinite` is traced as (x == x) * (abs(x) != inf).
    ATEN.eq: lambda a, b: True if a is b else (False if _is_infinite(b) else None),
    ATEN.ne: lambda a, b: False if a is b else (True if _is_infinite(b) else None),
    ATEN.lt: lambda _, b: True if _is_infinite(b) and b > 0 else None,
    ATEN.gt: lambda _, b: True if _is_infinite(b) and b < 0 else None,
}
"""By op, a function of the arguments of a call: what the call returns for all elements if they are finite; None if that
is unknown."""


def _first(value: Any, *_: Any) -> Any:
    return value


def _count(value: Any, *_: Any) -> int | None:
    return None if value else 0


_OF_TESTS: Mapping[Any, Callable[..., Any]] = {
    ATEN.mul: operator.mul,
    ATEN.add: lambda a, b, *alpha: None if alpha else a + b,
    ATEN.logical_and: lambda a, b: bool(a and b),
    ATEN.logical_or: lambda a, b: bool(a or b),
    **dict.fromkeys((ATEN.bitwise_and, ATEN.bitwise_and_), operator.and_),
    **dict.fromkeys((ATEN.bitwise_or, ATEN.bitwise_or_), operator.or_),
    **dict.fromkeys((ATEN.logical_not, ATEN.bitwise_not), operator.not_),
    **dict.fromkeys((ATEN.all, ATEN.any, ATEN.max, ATEN.min, ATEN.amax, ATEN.amin), _first),
    **dict.fromkeys((ATEN.view, ATEN._unsafe_view, ATEN.detach, ATEN.clone, ATEN._to_copy), _first),
    **dict.fromkeys((ATEN.sum, ATEN.count_nonzero), _count),
    **{getattr(ATEN, name): getattr(operator, name) for name in ("eq", "ne", "lt", "le", "gt", "ge")},
}
"""By op, a function of the values that a call's arguments have if all tested values are finite: the value of its
result; None if that is unknown."""
