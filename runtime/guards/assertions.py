"""Conditions that a forward only checks: it raises for one outcome, and goes on for the other.

A condition on what depends on a trained parameter is not known before a step runs. Where the forward raises for one of
its outcomes it has a single graph all the same, that of the other outcome, with a check of the condition in it. Which
of the two it is, is found by tracing both.
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
class Presumption:
    """The outcome that a condition is presumed to have, and the error of the other: a built-in type and its text."""

    outcome: bool
    kind: str = "RuntimeError"
    text: str = ""


@dataclass
class SpeculatedAssertions:
    """The conditions of a forward, in the order in which it looks at them."""

    known: list[Presumption] = field(default_factory=list)
    trial: bool | None = None
    """The outcome that is tried of the first condition that is not known."""
    asked: int = 0

    def begin(self) -> None:
        """The forward begins."""
        self.asked = 0

    def next(self) -> Presumption | None:
        """What the condition that the forward now looks at is presumed to be; None: nothing is."""
        at, self.asked = self.asked, self.asked + 1
        if at < len(self.known):
            return self.known[at]
        return None if at > len(self.known) or self.trial is None else Presumption(self.trial)

    def traced(self, trace: Callable[[], T]) -> T:
        """What ``trace`` gives once all conditions of the forward that it traces are presumed.

        Raises:
            DataDependentOutputException, DynamicOutputShapeException: the forward goes on for both outcomes of one, or
                looks at something else than conditions.
        """
        while True:
            try:
                return trace()
            except VALUES_DECIDE:
                if self.asked <= len(self.known):  # it was no condition that was looked at
                    raise
                errors = {outcome: self._error(outcome, trace) for outcome in (False, True)}
                raising = [outcome for outcome, error in errors.items() if error]
                if len(raising) != 1:
                    raise
                error = errors[raising[0]]
                self.known.append(Presumption(not raising[0], type(error).__name__, str(error)))

    def _error(self, outcome: bool, trace: Callable[[], object]) -> Exception | None:
        """What the forward raises for an outcome of the first condition that is not known."""
        self.trial = outcome
        try:
            trace()
        except Exception as error:  # a forward or the tracer may raise anything; which of them did, decides
            return error if _is_raised_by_forward(error) else None
        finally:
            self.trial = None
        return None


def _is_raised_by_forward(error: Exception) -> bool:
    """Whether it is a built-in error that a ``raise`` or ``assert`` raised which is none of a tracer's."""
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
