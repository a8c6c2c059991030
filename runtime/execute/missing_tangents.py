"""What a backward need not do when some outputs got no gradient, as a loss that does not use them leaves it.

Plain autograd skips what depends on such an output alone, gives no gradient to what only it depends on, and adds
nothing where it would meet other gradients. A planned backward does the same: the schedule less the calls skipped.
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
    """``zero``: values that are zero since a tangent is missing. ``skipped``: steps of the schedule, by position, that
    are not needed then. ``same``: sums that are their other summand, by the call, as the value that they equal."""

    zero: frozenset[str] = frozenset()
    skipped: frozenset[int] = frozenset()
    same: tuple[tuple[str, str], ...] = ()


def unused_by(step: CapturedStep, schedule: Schedule, turn: int, missing: Iterable[str]) -> Unused:
    """What the missing tangents (values) make superfluous in a schedule's steps from ``turn`` on."""
    found = zeros_without(step, missing)
    zero, same = found.values, found.sums
    once = {c.name for c in step.calls if c.seeded}
    wanted = {step.values[o.value].storage for o in step.outputs if o.kind in LATE and o.value not in zero}
    skipped = set()
    for at in reversed(range(turn, len(schedule))):
        one = schedule[at]
        if not isinstance(one, Run):
            continue
        call = step.call[one.op]
        made = {step.values[r].storage for r in call.results if r and r not in zero}
        # A random call that has not run yet draws, whoever needs what it gives.
        if wanted.isdisjoint(made) and not (one.op in once and _is_first(schedule, at)):
            skipped.add(at)
            continue
        wanted -= made
        # A sum that is its other summand reads that alone; a zero that is read with others is made on the spot.
        read = [same[call.name]] if call.name in same else [r.value for r in refs((call.args, call.kwargs))]
        wanted.update(step.values[v].storage for v in read if v not in zero)
    return Unused(zero, frozenset(skipped), tuple(same.items()))


def _is_first(schedule: Schedule, at: int) -> bool:
    return schedule[at] not in schedule[:at]
