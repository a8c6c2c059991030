"""The part of a backward that is superfluous if some outputs get no gradient, because the loss does not use
them.

Plain autograd skips all ops that depend only on such outputs, returns no gradient for what only they depend
on, and adds nothing where their gradients would meet others. A planned backward does the same: it skips these
calls of the schedule.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from rematplan.planner.core.schedule import Run, Schedule
from rematplan.runtime.graph.captured_step import CapturedStep, refs
from rematplan.runtime.graph.zero_tangents import zeros_without
from rematplan.runtime.problem.loss_boundary import LATE


@dataclass(frozen=True, slots=True)
class Unused:
    """What a backward may leave out, because tangents (gradients of outputs) are missing.

    ``zero``: names of values that are zero because a tangent is missing. ``skipped``: positions in the schedule of
    runs whose results are then superfluous. ``same``: the calls that add such a zero, each as a pair of the call's
    name and the value of its other summand, which its result equals.
    """

    zero: frozenset[str] = frozenset()
    skipped: frozenset[int] = frozenset()
    same: tuple[tuple[str, str], ...] = ()


def unused_by(step: CapturedStep, schedule: Schedule, start: int, missing: Iterable[str]) -> Unused:
    """Return what a schedule's runs from position ``start`` on need not compute if some tangents (gradients of
    outputs) are missing.

    Args:
        step: the captured step.
        schedule: a schedule of its planning problem.
        start: the position at which the backward begins.
        missing: the missing tangents (value names).
    """
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
        made = {step.values[r].storage for r in call.results if r and r not in zero}
        # The first run of a random call advances the generator, even if nothing reads its result.
        if wanted.isdisjoint(made) and not (one.op in once and _is_first(schedule, at)):
            skipped.add(at)
            continue
        wanted -= made
        # A sum with a zero reads only its other summand; a zero that is read with other values is made there.
        read = [same[call.name]] if call.name in same else [r.value for r in refs((call.args, call.kwargs))]
        wanted.update(step.values[v].storage for v in read if v not in zero)
    return Unused(zero, frozenset(skipped), tuple(same.items()))


def _is_first(schedule: Schedule, at: int) -> bool:
    return schedule[at] not in schedule[:at]
