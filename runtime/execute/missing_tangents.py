"""Skip what a backward need not compute if some outputs get no gradient, as plain autograd does.

An op whose result depends on missing gradients alone does not run. If a missing gradient would be added to another,
the other is the sum.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from rematplan.planner.core.schedule import Run, Schedule
from rematplan.runtime.graph.captured_step import CapturedStep
from rematplan.runtime.graph.zero_tangents import zeros_without
from rematplan.runtime.problem.loss_boundary import LATE


@dataclass(frozen=True, slots=True)
class Unused:
    """The parts of a backward that are superfluous because some tangents (gradients of outputs) are missing."""

    zero: frozenset[str] = frozenset()
    """The names of values that are zero because a tangent is missing."""
    skipped: frozenset[int] = frozenset()
    """Positions in the schedule of the op executions whose results nothing needs."""
    same: tuple[tuple[str, str], ...] = ()
    """Additions of a zero value to another value: the call's name, and the other value, which equals the sum."""


ALL_USED = Unused()


def unused_by(step: CapturedStep, schedule: Schedule, start: int, missing: Iterable[str]) -> Unused:
    """Return which values are zero, and which op executions from position ``start`` on are superfluous, if the tangents
    ``missing``, by value name, do not arrive. A random op's first execution is never superfluous."""
    found = zeros_without(step, missing)
    zero, same = found.values, found.sums
    once = {c.name for c in step.calls if c.seeded}
    wanted = {step.values[o.value].storage for o in step.outputs if o.kind in LATE and o.value not in zero}
    skipped = set()
    for at in reversed(range(start, len(schedule))):
        one = schedule[at]
        if not isinstance(one, Run):
            continue
        call = step.call[one.op]
        made = {step.values[r].storage for r in call.made if r not in zero}
        # The first run of a random call advances the generator, even if nothing reads its result.
        if wanted.isdisjoint(made) and not (one.op in once and _is_first(schedule, at)):
            skipped.add(at)
            continue
        wanted -= made
        # A sum with a zero reads only its other summand. A call that reads a zero and other values makes the zero.
        read = [same[call.name]] if call.name in same else list(call.operands)
        wanted.update(step.values[v].storage for v in read if v not in zero)
    return Unused(zero, frozenset(skipped), tuple(same.items()))


def _is_first(schedule: Schedule, at: int) -> bool:
    return schedule[at] not in schedule[:at]
