"""What every form of generated code has in common: which values exist at each position of a schedule, when views are
made, and which random ops are replayed."""

from __future__ import annotations

from abc import ABC, abstractmethod

from rematplan.ir import ProblemError
from rematplan.planner.core.schedule import Run, Schedule
from rematplan.runtime.execute.random_replay import replayed_ops
from rematplan.runtime.graph.captured_step import Call, CapturedStep, refs


class Emitter(ABC):
    """Follows which values are alive while a subclass emits the ops of a schedule as code.

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
        """Emit one call and mark its results as alive. Its arguments must be alive, or views, which are emitted
        first."""

    @abstractmethod
    def fetch(self, value: str) -> bool:
        """Bring a value to life that no call of the emitted code makes, and return True; return False if there is no
        such value."""

    def is_alive(self, value: str) -> bool:
        """Return whether the code emitted so far has made a value, and has not freed its storage."""
        return value in self.alive.get(self.step.values[value].storage, ())

    def is_view(self, value: str) -> bool:
        """Return whether a call makes a value as a view of another one."""
        call = self.step.values[value].call
        return call is not None and self.step.call[call].is_view

    def bring_to_life(self, value: str) -> None:
        """Mark a value as alive."""
        self.alive.setdefault(self.step.values[value].storage, {})[value] = None

    def free(self, storage: str) -> list[str]:
        """Mark all values in a storage as dead, and return those that were alive."""
        return list(self.alive.pop(storage, ()))

    def call_of(self, run: Run, at: int) -> Call:
        """Return the call that a run at position ``at`` of the schedule executes.

        Raises:
            ProblemError: the step has no such op.
        """
        call = self.step.call.get(run.op)
        if call is None:
            raise ProblemError(f"step {at}: {self.step.name} has no op named {run.op!r}")
        return call

    def make(self, value: str) -> None:
        """Bring a value to life, unless it is alive: emit the calls that make the view, and the views it is a view
        of. (A loop instead of recursion, since chains of views may be longer than Python's stack.)

        Raises:
            ProblemError: the value's storage is not resident.
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
