"""The check of fused kernels on the real numbers of a training step, while a plan runs first.

After its kernel, a region then also runs in eager mode and in float64. This takes memory, so a kernel is checked at
the call at which most of the budget is unused, if that is enough.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch

from rematplan.planner.core.schedule import Run, Schedule
from rematplan.runtime.fuse.kernel import CannotFuse, FusedKernel
from rematplan.runtime.graph.captured_step import CapturedStep


@dataclass(frozen=True, eq=False)
class CheckedKernel:
    """A kernel that compares its first results with those of eager mode and of float64. If they are too far off, it
    returns those of eager mode."""

    kernel: FusedKernel

    namespace = "fused"

    def __str__(self) -> str:
        return f"{self.kernel}.checked"

    def __call__(self, *args: Any) -> Any:
        """Return the kernel's results. At its first call in any step they are checked; if they fail, those of eager
        mode are returned and ``kernel.real.error`` says why."""
        if self.kernel.real.checked:
            return self.kernel(*args)
        self.kernel.real.checked = True
        found = self.kernel.compiled(list(args))
        try:
            with torch.no_grad():
                self.kernel.ops.check(args[len(self.kernel.sizes) :], found)
        except CannotFuse as error:
            self.kernel.real.error = str(error)
            del found
            return self.kernel.in_eager_mode(*args)
        return found[0] if len(found) == 1 else tuple(found)


def with_checks(step: CapturedStep, schedule: Schedule, unused: Sequence[int]) -> CapturedStep:
    """Return the step with a check of each kernel that was not checked yet, where ``unused`` suffices for one.

    ``unused``: by position of the schedule, the unused bytes of the budget. Nothing is checked if it is empty.
    """
    room: dict[str, int] = {}
    for one, left in zip(schedule, unused, strict=bool(unused)):
        if isinstance(one, Run):
            room[one.op] = min(left, room.get(one.op, left))
    best: dict[FusedKernel, str] = {}
    for call in step.calls:
        if isinstance(call.target, FusedKernel) and not call.target.real.checked and call.name in room:
            before = best.setdefault(call.target, call.name)
            if room[call.name] > room[before]:
                best[call.target] = call.name
    chosen = {name for kernel, name in best.items() if room[name] >= kernel.check_bytes}
    if not chosen:
        return step
    calls = (
        replace(c, target=CheckedKernel(c.target))
        if isinstance(c.target, FusedKernel) and c.name in chosen
        else c
        for c in step.calls
    )
    return replace(step, calls=tuple(calls))
