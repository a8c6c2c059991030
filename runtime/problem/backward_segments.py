"""Divide the backward half of a schedule into segments, at whose ends gradients are returned to autograd.

An all-reduce of such a gradient overlaps the rest of the backward, and an optimizer in gradient hooks frees it
early.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

from rematplan.planner.core.schedule import Free, Run, Schedule
from rematplan.runtime.graph.captured_step import GRADIENT_OF, CapturedStep, StepOutput

MOST_SEGMENTS = 16
"""The largest number of segments. Each costs some tens of microseconds in autograd."""
LEAST_SEGMENT_BYTES = 2**20
"""The smallest number of gradient bytes for which a segment is worth its cost."""


@dataclass(frozen=True, slots=True)
class Segment:
    """A part of the backward half of a schedule, at whose end the gradients that are ready are returned to autograd."""

    start: int
    """The position in the schedule of the first entry."""
    end: int
    """The position after the last entry."""
    outputs: tuple[StepOutput, ...]
    """The gradients that are returned when the segment ends."""
    statistics: tuple[StepOutput, ...] = ()
    """The sums over rows of layers, for Kronecker factors, that the segment's ops compute."""


def gradient_segments(
    step: CapturedStep, schedule: Schedule, start: int, spare: Sequence[int], late: int | None
) -> tuple[Segment, ...]:
    """Divide the backward half of a schedule, from ``start`` on, into segments, at least one, with about equal bytes of
    gradients. They are shorter where ``spare`` (unused bytes by position; empty: no limit) has no room for gradients
    that wait. They also end at ``late``, a split backward's second part; a backward that communicates is divided only
    there."""
    ready = _ready(step, schedule, split=late is not None)
    gradients = sorted((o for o in step.outputs if "gradient" in o.kind), key=ready.__getitem__)
    sizes = {o: step.storage_bytes[step.values[o.value].storage] for o in gradients}
    enough = max(LEAST_SEGMENT_BYTES, -(-sum(sizes.values()) // MOST_SEGMENTS))

    communicates = any(c.collective and c.name in step.after_loss for c in step.calls)

    def parts(start: int, end: int, gradients: Sequence[StepOutput]) -> Iterator[Segment]:
        """Yield segments from ``start`` to ``end``. One ends early if waiting gradients sum to ``enough`` bytes, or do
        not fit until the next is ready; not if the backward communicates."""
        returned: list[StepOutput] = []
        waiting = 0
        # Not strict: there may be no gradients.
        for gradient, later in zip(gradients, [*gradients[1:], None], strict=False):
            returned.append(gradient)
            waiting += sizes[gradient]
            at = ready[gradient]
            # Gradients that one op computes are returned together.
            if later is None or ready[later] == at or communicates:
                continue
            # If they are not returned now, they wait while the ops run that compute the next gradient.
            if waiting >= enough or waiting > min(spare[at + 1 : ready[later] + 1], default=waiting):
                cut = max(at + 1, start)
                while isinstance(schedule[cut], Free):
                    cut += 1
                yield Segment(start, cut, tuple(returned))
                start, returned, waiting = cut, [], 0
        yield Segment(start, end, tuple(returned))

    if late is None:
        return _with_statistics(step, schedule, [*parts(start, len(schedule), gradients)])
    sooner = bisect_left(gradients, late, key=ready.__getitem__)
    both = [*parts(start, late, gradients[:sooner]), *parts(late, len(schedule), gradients[sooner:])]
    return _with_statistics(step, schedule, both)


def _with_statistics(
    step: CapturedStep, schedule: Schedule, segments: Sequence[Segment]
) -> tuple[Segment, ...]:
    """Return the segments of a backward, each with the statistics (sums over rows of layers) that its ops compute."""
    of = {step.values[o.value].call: o for o in step.outputs if o.kind == "statistic"}
    if not of:
        return tuple(segments)

    def made(segment: Segment) -> Iterator[StepOutput]:
        for one in schedule[segment.start : segment.end]:
            if isinstance(one, Run) and one.op in of:
                yield of[one.op]

    return tuple(replace(segment, statistics=tuple(made(segment))) for segment in segments)


def _ready(step: CapturedStep, schedule: Schedule, split: bool) -> dict[StepOutput, int]:
    """Return, for each gradient, the position of the last op execution that must end before it is returned to
    autograd; -1 if none must. ``split``: whether the backward is split."""
    last = dict.fromkeys(step.storage_bytes, -1)
    for at, one in enumerate(schedule):
        if isinstance(one, Run):
            call = step.call[one.op]
            last.update(dict.fromkeys((*step.reads(call), *step.writes(call)), at))
    of = {(GRADIENT_OF.get(i.kind), i.target): step.values[i.value].storage for i in step.inputs}

    def changed(o: StepOutput) -> int:
        """Return where the tensor whose gradient is ``o`` is read last, or -1 for inputs of a split backward."""
        # An optimizer in the gradient's hook may change the tensor. A split backward returns input gradients
        # before weight gradients read the input.
        return -1 if split and o.kind == "input gradient" else last[of[o.kind, o.target]]

    return {
        o: max(last[step.values[o.value].storage], changed(o)) for o in step.outputs if "gradient" in o.kind
    }
