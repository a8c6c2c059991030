"""What a backward need not do when some outputs got no gradient, as a loss that does not use them leaves it.

Plain autograd skips what depends on such an output alone, gives no gradient to what only it depends on, and adds
nothing where it would meet other gradients. A planned backward does the same: the schedule less the calls skipped.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

import torch

from rematplan.planner.core.schedule import Run, Schedule
from rematplan.runtime.graph.captured_step import Call, CapturedStep, Ref, refs


@dataclass(frozen=True, slots=True)
class Unused:
    """``zero``: values that are zero since a tangent is missing. ``skipped``: steps of the schedule, by position, that
    are not needed then. ``same``: sums that are their other summand, by the call, as the value that they equal."""

    zero: frozenset[str] = frozenset()
    skipped: frozenset[int] = frozenset()
    same: tuple[tuple[str, str], ...] = ()


def unused_by(step: CapturedStep, schedule: Schedule, turn: int, missing: Iterable[str]) -> Unused:
    """What the missing tangents (values) make superfluous in a schedule's steps from ``turn`` on."""
    zero, same = _zeros(step, set(missing))
    once = {c.name for c in step.calls if c.seeded}
    wanted = {
        step.values[o.value].storage for o in step.outputs if "gradient" in o.kind and o.value not in zero
    }
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
    return Unused(frozenset(zero), frozenset(skipped), tuple(same.items()))


def lies_otherwise(step: CapturedStep, missing: Iterable[str]) -> bool:
    """Whether a sum lies otherwise in memory than its other summand, which takes its place where tangents are
    missing."""
    lies = {name: value.fake.stride() for name, value in step.values.items()}
    same = _zeros(step, set(missing))[1]
    return any(lies[str(step.call[name].results[0])] != lies[value] for name, value in same.items())


def _zeros(step: CapturedStep, missing: set[str]) -> tuple[set[str], dict[str, str]]:
    """The values that are zero, and the sums that are their other summand.

    What a tangent goes through is linear in it, so a call all of whose tangents are zero gives zero.
    """
    late = {i.value for i in step.inputs if i.kind == "tangent"}
    zero = set(missing)
    same: dict[str, str] = {}
    for call in step.calls:
        of_tangents = [r.value for r in refs((call.args, call.kwargs)) if r.value in late]
        if not of_tangents:
            continue
        results = [r for r in call.results if r]
        late.update(results)
        left = [v for v in of_tangents if v not in zero]
        if not left:
            zero.update(results)
        elif len(left) < len(of_tangents) and _is_plain_sum(call):
            same[call.name] = left[0]
    return zero, same


def _is_plain_sum(call: Call) -> bool:
    summands = [a for a in call.args if isinstance(a, Ref)]
    return call.target is torch.ops.aten.add.Tensor and len(summands) == 2 and not call.kwargs


def _is_first(schedule: Schedule, at: int) -> bool:
    return schedule[at] not in schedule[:at]
