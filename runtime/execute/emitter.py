"""The common part of all code generators: they follow which values exist at each position of a schedule, when views
are computed, and which random ops run more than once."""

from __future__ import annotations

from abc import ABC, abstractmethod

from rematplan.ir import ProblemError
from rematplan.planner.core.schedule import Run, Schedule
from rematplan.runtime.execute.random_replay import replayed_ops
from rematplan.runtime.graph.captured_step import Call, CapturedStep, refs


class Emitter(ABC):
    """Follows which values are alive (present in the generated code) while a subclass emits the ops of a schedule as
    code.

    A view is emitted at its first use and is dead when its storage is freed, so that no view is computed twice.

    Args:
        step: the captured step.
        schedule: a schedule of its planning problem.
    """

    def __init__(self, step: CapturedStep, schedule: Schedule) -> None:
        self.step, self.schedule = step, schedule
        self.alive: dict[str, dict[str, None]] = {}  # storage → its values that exist in the code
        self.rerun = replayed_ops(step, schedule)

    @abstractmethod
    def emit(self, call: Call) -> None:
        """Emit the code of a call, and mark the call's results as alive (present in the code). Arguments that are
        views are emitted first. All other arguments must be alive."""

    @abstractmethod
    def fetch(self, value: str) -> bool:
        """Make a value alive that no op of this code computes (a constant, for example), and return True. Return False
        if it is not such a value."""

    def is_alive(self, value: str) -> bool:
        """Return whether a value is in the code emitted so far and its storage is not freed."""
        return value in self.alive.get(self.step.values[value].storage, ())

    def is_view(self, value: str) -> bool:
        """Return whether a value is the result of a view call."""
        call = self.step.values[value].call
        return call is not None and self.step.call[call].is_view

    def mark_alive(self, value: str) -> None:
        """Mark a value as alive: it is present in the code from now on."""
        self.alive.setdefault(self.step.values[value].storage, {})[value] = None

    def free(self, storage: str) -> list[str]:
        """Mark all values in a storage as dead, and return those that were alive (present in the code)."""
        return list(self.alive.pop(storage, ()))

    def call_of(self, run: Run, at: int) -> Call:
        """Return the call that an entry of the schedule executes. ``run``: the entry, which names the call. ``at``:
        its position in the schedule, for the message.
        """
        call = self.step.call.get(run.op)
        if call is None:
            raise ProblemError(f"step {at}: {self.step.name} has no op named {run.op!r}")
        return call

    def make(self, value: str) -> None:
        """Make a value alive (present in the code), unless it is. If the value is a view, emit the call that computes
        it, after the calls that compute the views it is a view of. Otherwise `fetch` must make it alive: the value is
        not computed by this code. (A loop instead of recursion, since chains of views may be longer than Python's
        stack.)
        """
        stack = [value]
        while stack:
            top = stack[-1]
            if self.is_alive(top) or self.fetch(top):
                stack.pop()
                continue
            if not self.is_view(top):
                raise ProblemError(f"{self.step.name}: {top!r} is read, but its storage is not resident")
            call = self.step.call[self.step.values[top].call or ""]
            missing = [r.value for r in refs((call.args, call.kwargs)) if not self.is_alive(r.value)]
            stack += missing
            if not missing:
                self.emit(call)
                stack.pop()
