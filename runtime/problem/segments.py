"""Where a schedule's backward half is cut, so that gradients leave it as they are ready.

What waits for them can then begin before the backward is over: an all-reduce of them overlaps the rest, and an
optimizer that runs in the gradients' hooks frees them.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

from rematplan.planner.core.schedule import Free, Run, Schedule
from rematplan.runtime.graph.captured_step import GRADIENT_OF, CapturedStep, StepOutput

MOST_SEGMENTS = 16
"""Segments at most: each costs some tens of microseconds on its way through autograd."""
LEAST_SEGMENT_BYTES = 2**20
"""Bytes of gradients below which it is not worth a segment."""


@dataclass(frozen=True, slots=True)
class Segment:
    """Steps ``start`` to ``end`` of a schedule, after which the gradients ``outputs`` are ready, and the ``statistics``
    that are made on the way."""

    start: int
    end: int
    outputs: tuple[StepOutput, ...]
    statistics: tuple[StepOutput, ...] = ()


def gradient_segments(
    step: CapturedStep,
    schedule: Schedule,
    start: int,
    spare: Sequence[int] = (),
    most: int = MOST_SEGMENTS,
    least: int = LEAST_SEGMENT_BYTES,
    late: int | None = None,
) -> tuple[Segment, ...]:
    """The backward half of a schedule, from ``start`` on, in at least one and at most ``most`` segments, of about equal
    bytes of gradients, but no fewer than ``least``.

    ``spare``: bytes at each position, if gradients that wait for the end of their segment may hold no more. It ends
    before a position where they would, so that there may be more segments. ``late``: a position at which one ends.
    Where the backward communicates, there is no other end: a data-parallel model sends gradients between segments, in
    all processes at the same place.
    """
    ready = _ready(step, schedule, split=late is not None)
    gradients = sorted((o for o in step.outputs if "gradient" in o.kind), key=ready.__getitem__)
    sizes = {o: step.storage_bytes[step.values[o.value].storage] for o in gradients}
    enough = max(least, -(-sum(sizes.values()) // most))

    communicates = any(c.collective and c.name in step.after_turn for c in step.calls)

    def parts(start: int, end: int, gradients: Sequence[StepOutput]) -> Iterator[Segment]:
        given: list[StepOutput] = []
        waiting = 0
        for gradient, later in zip(gradients, [*gradients[1:], None], strict=False):  # none of none
            given.append(gradient)
            waiting += sizes[gradient]
            at = ready[gradient]
            # Gradients that one op makes leave together.
            if later is None or ready[later] == at or communicates:
                continue
            if waiting >= enough or waiting > min(spare[at + 1 : ready[later] + 1], default=waiting):
                cut = max(at + 1, start)
                while isinstance(schedule[cut], Free):
                    cut += 1
                yield Segment(start, cut, tuple(given))
                start, given, waiting = cut, [], 0
        yield Segment(start, end, tuple(given))

    if late is None:
        return _with_statistics(step, schedule, [*parts(start, len(schedule), gradients)])
    sooner = bisect_left(gradients, late, key=ready.__getitem__)
    both = [*parts(start, late, gradients[:sooner]), *parts(late, len(schedule), gradients[sooner:])]
    return _with_statistics(step, schedule, both)


def _with_statistics(
    step: CapturedStep, schedule: Schedule, segments: Sequence[Segment]
) -> tuple[Segment, ...]:
    """The segments with the statistics that the ops of each make."""
    of = {step.values[o.value].call: o for o in step.outputs if o.kind == "statistic"}
    if not of:
        return tuple(segments)

    def made(segment: Segment) -> Iterator[StepOutput]:
        for one in schedule[segment.start : segment.end]:
            if isinstance(one, Run) and one.op in of:
                yield of[one.op]

    return tuple(replace(segment, statistics=tuple(made(segment))) for segment in segments)


def _ready(step: CapturedStep, schedule: Schedule, split: bool) -> dict[StepOutput, int]:
    """For each gradient the position from which on it may leave; −1 before all.

    That is the last one that reads or writes it, or reads what it is the gradient of: an optimizer that runs in the
    gradient's hook changes that. Of a ``split`` backward an input's gradient leaves before the gradients of weights
    that read the input are made.
    """
    last = dict.fromkeys(step.storage_bytes, -1)
    for at, one in enumerate(schedule):
        if isinstance(one, Run):
            call = step.call[one.op]
            last.update(dict.fromkeys((*step.reads(call), *step.writes(call)), at))
    of = {(GRADIENT_OF.get(i.kind), i.target): step.values[i.value].storage for i in step.inputs}

    def changed(o: StepOutput) -> int:
        """The last read of what is changed once the gradient has left."""
        return -1 if split and o.kind == "input gradient" else last[of[o.kind, o.target]]

    return {
        o: max(last[step.values[o.value].storage], changed(o)) for o in step.outputs if "gradient" in o.kind
    }
