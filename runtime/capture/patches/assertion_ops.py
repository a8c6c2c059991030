"""Assertion ops that return an empty tensor, in place of PyTorch's assertion ops, which return nothing. A tracer would
remove ops without a result."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
import torch.fx

from rematplan.runtime.graph.compat import TorchDispatchMode
from rematplan.runtime.guards.assertions import (
    CHECK_CONDITION,
    VALUES_DECIDE,
    Assertion,
    SpeculatedAssertions,
)
from rematplan.runtime.guards.finite_tests import CHECK_OUTCOME, FiniteTests

ATEN = torch.ops.aten


@torch.library.custom_op("rematplan::assert_async", mutates_args=())
def _assert_async(holds: torch.Tensor, message: str | None = None) -> torch.Tensor:
    if message is None:
        ATEN._assert_async(holds)
    else:
        ATEN._assert_async.msg(holds, message)
    return _nothing(holds)


@torch.library.custom_op("rematplan::linalg_check_errors", mutates_args=())
def _linalg_check_errors(info: torch.Tensor, api_name: str, *, is_matrix: bool) -> torch.Tensor:
    ATEN._linalg_check_errors(info, api_name, is_matrix=is_matrix)
    return _nothing(info)


def _nothing(like: torch.Tensor, *_: Any, **__: Any) -> torch.Tensor:
    return like.new_empty(0)


_assert_async.register_fake(_nothing)
_linalg_check_errors.register_fake(_nothing)

_WITH_RESULT: Mapping[Any, Callable[..., torch.Tensor]] = {
    ATEN._assert_async.default: torch.ops.rematplan.assert_async.default,
    ATEN._assert_async.msg: torch.ops.rematplan.assert_async.default,
    ATEN._linalg_check_errors.default: torch.ops.rematplan.linalg_check_errors.default,
}
# PyTorch 2.11 removes checks in a backward as dead code, so they would be neither made nor refused.
for _check in _WITH_RESULT:
    torch.fx.has_side_effect(_check)

_AS_TENSOR: Mapping[Any, Callable[..., torch.Tensor]] = {
    ATEN.allclose.default: lambda *args, **kwargs: torch.isclose(*args, **kwargs).all(),
    ATEN.equal.default: lambda a, b: (a == b).all(),
}
"""By op that returns a truth value, a function that returns it as a tensor, for arguments of one shape."""

_VALID = Assertion(
    True, "ValueError", "a parameter or a sample of a distribution does not satisfy its constraint"
)
"""What torch.distributions validates, and the error if it does not hold; the original would print values."""


class Checks(TorchDispatchMode):
    """Replaces, inside the block, assertion ops by variants that return an empty tensor, so that a tracer keeps them. A
    boolean that is unknown in the trace gets the outcome of ``finite`` or ``assertions``, with an op that asserts it;
    else the tracer's error is raised."""

    supports_higher_order_operators = True  # they are not changed

    def __init__(self, assertions: SpeculatedAssertions, finite: FiniteTests | None) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        #: The tensors that the assertion ops return. They must be outputs of the graph, or the ops are
        #: removed.
        self.results: list[torch.Tensor] = []
        self.assertions, self.finite = assertions, finite

    def __torch_dispatch__(
        self, func: Any, types: Sequence[type], args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        """Run an op. An assertion becomes an op with a result; an unknown truth value becomes the assumed one, with an
        op that asserts it. Their results join ``results``."""
        del types
        if func is ATEN._is_all_true.default:  # called by torch.distributions, which raises if false
            return torch.tensor(self._assert(ATEN.all.default(*args), _VALID))
        if func is ATEN._local_scalar_dense.default and args[0].dtype is torch.bool:
            return self._condition(*args)
        if func in _AS_TENSOR:
            return self._comparison(func, *args, **(kwargs or {}))
        check = _WITH_RESULT.get(func)
        if check is None:
            result = func(*args, **(kwargs or {}))
            if self.finite is not None:
                self.finite.note(func, args, result)
            return result
        self.results.append(check(*args, **(kwargs or {})))
        return None

    def _condition(self, condition: torch.Tensor) -> Any:
        """Return a truth value; if it is unknown, the assumed one, and add an op that asserts it to `results`. The
        tracer's error is raised if none is assumed."""
        try:
            return ATEN._local_scalar_dense.default(condition)
        except VALUES_DECIDE:
            outcomes = self.finite.next(condition) if self.finite else None
            if outcomes is not None:
                self.results.append(CHECK_OUTCOME(condition, outcomes))
                return outcomes[-1]
            expected = self.assertions.next()
            if expected is None:
                raise
        return self._assert(condition, expected)

    def _comparison(self, func: Any, a: torch.Tensor, b: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
        """Return the truth value of a comparison of two tensors. If it is unknown, return the assumed one, and add an
        op that asserts it to `results`. The tracer's error is raised if none is assumed, or if the shapes differ."""
        try:
            return func(a, b, *args, **kwargs)
        except VALUES_DECIDE:
            if a.shape != b.shape:
                raise
        return self._condition(_AS_TENSOR[func](a, b, *args, **kwargs))

    def _assert(self, condition: torch.Tensor, expected: Assertion) -> bool:
        self.results.append(CHECK_CONDITION(condition, expected.outcome, expected.kind, expected.text))
        return expected.outcome
