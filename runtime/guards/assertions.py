"""Speculated assertions: conditions for which a forward raises an error if they have one outcome (true or false), and
continues if they have the other.

A condition on a value that depends on a trained parameter is unknown before the step runs. If the forward raises for
one outcome, it still has a single graph: that of the other outcome, with an op that checks the condition. Which outcome
raises is found by tracing the forward with both.
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
    """A condition that a forward asserts: with one outcome the forward continues, with the other it raises an error.

    ``outcome``: the outcome with which the forward continues. ``kind``, ``text``: the error that it raises otherwise,
    as the name of a built-in exception type and its message.
    """

    outcome: bool
    kind: str = "RuntimeError"
    text: str = ""


@dataclass
class SpeculatedAssertions:
    """The conditions that a forward asserts, in the order in which it evaluates them. They are found by tracing the
    forward with both outcomes of each condition.

    ``known``: the assertions found so far. ``asked``: the number of conditions that the present trace has evaluated.
    """

    known: list[Assertion] = field(default_factory=list)
    trial: bool | None = None
    """The outcome to be assumed for the first unknown condition; None to assume none."""
    asked: int = 0

    def begin(self) -> None:
        """Prepare for another trace of the forward: the next call of `next` is about the first condition of the
        forward."""
        self.asked = 0

    def next(self) -> Assertion | None:
        """Return the assertion that is assumed for the condition that the forward evaluates now.

        Conditions are counted in the order in which a trace evaluates them. For a condition with a known assertion,
        that is returned. For the first condition without one, an assertion of the outcome `trial` is returned; None if
        `trial` is None. For all later conditions, None is returned.
        """
        at, self.asked = self.asked, self.asked + 1
        if at < len(self.known):
            return self.known[at]
        return None if at > len(self.known) or self.trial is None else Assertion(self.trial)

    def traced(self, trace: Callable[[], T]) -> T:
        """Trace a forward until the outcome of each of its conditions is known, and return the result of the last
        trace.

        When a trace stops at a condition of unknown outcome, the forward is traced with both outcomes. If it raises an
        error for exactly one of them, it is assumed to assert the other outcome.
        """
        while True:
            try:
                return trace()
            except VALUES_DECIDE:
                if self.asked <= len(self.known):  # the forward depends on a value that is not a condition
                    raise
                errors = {outcome: self._error(outcome, trace) for outcome in (False, True)}
                raising = [outcome for outcome, error in errors.items() if error]
                if len(raising) != 1:
                    raise
                error = errors[raising[0]]
                self.known.append(Assertion(not raising[0], type(error).__name__, str(error)))

    def _error(self, outcome: bool, trace: Callable[[], object]) -> Exception | None:
        """Trace the forward with ``outcome`` assumed for the first condition whose outcome is unknown. Return the error
        that a statement of the forward raises; None if there is none. Errors of the tracer do not count."""
        self.trial = outcome
        try:
            trace()
        except Exception as error:  # any error of the forward or of the tracer; only the former count
            return error if _is_raised_by_forward(error) else None
        finally:
            self.trial = None
        return None


def _is_raised_by_forward(error: Exception) -> bool:
    """Return whether an error was raised by a ``raise`` or ``assert`` statement in code that is not the tracer's (torch
    or this package), and has a built-in type."""
    last = error.__traceback__
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
