"""What all code generators share: which values exist where, when views are computed, which draws run again."""

from __future__ import annotations

from abc import ABC, abstractmethod

from rematplan.ir import ProblemError
from rematplan.planner.core.schedule import Run, Schedule
from rematplan.runtime.execute.random_replay import replayed_ops
from rematplan.runtime.graph.captured_step import Call, CapturedStep


class Emitter(ABC):
    """Follows which values are alive (present in the generated code) while a subclass emits the ops of a schedule. A
    view is emitted at its first use and dies with its storage."""

    def __init__(self, step: CapturedStep, schedule: Schedule) -> None:
        self.step, self.schedule = step, schedule
        self.alive: dict[str, dict[str, None]] = {}  # storage → its values that exist in the code
        self.rerun = replayed_ops(step, schedule)

    @abstractmethod
    def emit(self, call: Call) -> None:
        """Emit a call, and mark its results as alive. Arguments that are views are emitted first; all others must be
        alive."""

    @abstractmethod
    def fetch(self, value: str) -> bool:
        """Make a value alive that no op of this code computes, such as a constant. Return whether it is one."""

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
        """Return the call that an entry of the schedule executes, or raise `ProblemError` with its position if the
        step has none."""
        call = self.step.call.get(run.op)
        if call is None:
            raise ProblemError(f"step {at}: {self.step.name} has no op named {run.op!r}")
        return call

    def make(self, value: str) -> None:
        """Make a value alive if it is not: fetch it, or emit the view calls that compute it. Raises `ProblemError` if a
        storage that it needs is not resident."""
        # A loop instead of recursion: chains of views may be longer than Python's stack.
        stack = [value]
        while stack:
            top = stack[-1]
            if self.is_alive(top) or self.fetch(top):
                stack.pop()
                continue
            if not self.is_view(top):
                raise ProblemError(f"{self.step.name}: {top!r} is read, but its storage is not resident")
            call = self.step.call[self.step.values[top].call or ""]
            missing = [r for r in call.operands if not self.is_alive(r)]
            stack += missing
            if not missing:
                self.emit(call)
                stack.pop()
