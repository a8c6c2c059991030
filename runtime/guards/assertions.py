"""Speculated assertions: conditions for which a forward raises an error if they have one outcome, and continues if
they have the other.

A condition on trained values is unknown before the step runs. Tracing with both outcomes shows which one raises; the
graph is that of the other, with an op that checks the condition.
"""

from __future__ import annotations

import builtins
import dis
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import TypeVar

import torch

from rematplan.runtime.graph.compat import DataDependentOutputException, DynamicOutputShapeException

T = TypeVar("T")
VALUES_DECIDE = (DataDependentOutputException, DynamicOutputShapeException)
RAISE = dis.opmap["RAISE_VARARGS"]
TRACERS = ("torch._", "torch.fx.", "torch.utils._", "rematplan.")


@dataclass(frozen=True)
class Assertion:
    """A condition that a forward asserts: with one outcome the forward continues, with the other it raises an error."""

    outcome: bool
    """The outcome with which the forward continues."""
    kind: str = "RuntimeError"
    """The error that it raises otherwise, by the name of a built-in exception type."""
    text: str = ""
    """The error's message."""


@dataclass
class SpeculatedAssertions:
    """The conditions that a forward asserts, in order, found by tracing it with both outcomes of each."""

    known: list[Assertion] = field(default_factory=list)
    """The assertions found so far."""
    trial: bool | None = None
    """The outcome to be assumed for the first unknown condition; None to assume none."""
    asked: int = 0
    """The number of conditions that the present trace has evaluated."""

    def begin(self) -> None:
        """Prepare for another trace: the next call of `next` is about the first condition of the forward."""
        self.asked = 0

    def next(self) -> Assertion | None:
        """Count a condition that the forward evaluates. Return its known assertion; for the first unknown one, that
        of `trial`; else None."""
        at, self.asked = self.asked, self.asked + 1
        if at < len(self.known):
            return self.known[at]
        return None if at > len(self.known) or self.trial is None else Assertion(self.trial)

    def traced(self, trace: Callable[[], T]) -> T:
        """Trace a forward until each condition's outcome is known, and return the last trace's result. A condition for
        which exactly one outcome raises is assumed to assert the other; else the tracer's error is raised."""
        while True:
            try:
                return trace()
            except VALUES_DECIDE as reason:
                self._assume(reason, trace)

    def _assume(self, reason: Exception | None, trace: Callable[[], object]) -> None:
        """Add to `known` the assertion at which a trace ended for want of a value, and those at which the next traces
        would. Raise the trace's error (first ``reason``) if it ended at no assertion."""
        while isinstance(reason, VALUES_DECIDE):
            if self.asked <= len(self.known):  # the forward depends on a value that is not a condition
                raise reason
            ends = {outcome: self._end(outcome, trace) for outcome in (False, True)}
            raising = [outcome for outcome, (error, _) in ends.items() if _is_raised_by_forward(error)]
            if len(raising) != 1:
                raise reason
            error = ends[raising[0]][0]
            assert error is not None
            text = str(error.args[0]) if len(error.args) == 1 else str(error)  # a KeyError's has quotes
            self.known.append(Assertion(not raising[0], type(error).__name__, text))
            reason, self.asked = ends[not raising[0]]  # the next trace would end there, too

    def _end(self, outcome: bool, trace: Callable[[], object]) -> tuple[Exception | None, int]:
        """Trace the forward with ``outcome`` for the first unknown condition. Return the error that ends it, if any,
        and how many conditions it has evaluated."""
        self.trial = outcome
        try:
            trace()
        # The forward may raise anything with a wrong outcome, and the tracer, too: the caller decides by the error.
        except Exception as error:
            return error, self.asked
        finally:
            self.trial = None
        return None, self.asked


def _is_raised_by_forward(error: Exception | None) -> bool:
    """Return whether a built-in error was raised by ``raise`` or ``assert`` in code that is not the tracer's."""
    last = error.__traceback__ if error else None
    while last and last.tb_next:
        last = last.tb_next
    if last is None or getattr(builtins, type(error).__name__, None) is not type(error):
        return False
    frame = last.tb_frame
    where = str(frame.f_globals.get("__name__"))
    return frame.f_code.co_code[last.tb_lasti] == RAISE and not where.startswith(TRACERS)


@torch.library.custom_op("rematplan::check_condition", mutates_args=())
def _check_condition(condition: torch.Tensor, outcome: bool, kind: str, text: str) -> torch.Tensor:
    if bool(condition) != outcome:
        raise getattr(builtins, kind)(text)
    return condition.new_empty(0)


_check_condition.register_fake(lambda condition, outcome, kind, text: condition.new_empty(0))
CHECK_CONDITION = torch.ops.rematplan.check_condition.default
