"""Where a schedule's backward half is cut, so that gradients leave it as they are ready.

What waits for them can then begin before the backward is over: an all-reduce of them overlaps the rest, and an
optimizer that runs in the gradients' hooks frees them.
"""

from __future__ import annotations

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
) -> tuple[Segment, ...]:
    """The backward half of a schedule, from ``start`` on, in at least one and at most ``most`` segments, of about equal
    bytes of gradients, but no fewer than ``least``.

    ``spare``: bytes at each position, if gradients that wait for the end of their segment may hold no more. It ends
    before a position where they would, so that there may be more segments. Where the backward communicates, there is
    one: a data-parallel model sends gradients between segments, in all processes at the same place.
    """
    ready = _ready(step, schedule)
    gradients = sorted((o for o in step.outputs if "gradient" in o.kind), key=ready.__getitem__)
    if any(c.collective and c.name in step.after_turn for c in step.calls):
        return (Segment(start, len(schedule), tuple(gradients)),)
    sizes = [step.storage_bytes[step.values[o.value].storage] for o in gradients]
    enough = max(least, -(-sum(sizes) // most))
    segments: list[Segment] = []
    given: list[StepOutput] = []
    waiting = 0
    for gradient, size, later in zip(gradients, sizes, [*gradients[1:], None], strict=True):
        given.append(gradient)
        waiting += size
        at = ready[gradient]
        # Gradients that one op makes leave together.
        if later is None or ready[later] == at:
            continue
        if waiting >= enough or waiting > min(spare[at + 1 : ready[later] + 1], default=waiting):
            end = max(at + 1, start)
            while isinstance(schedule[end], Free):
                end += 1
            segments.append(Segment(start, end, tuple(given)))
            start, given, waiting = end, [], 0
    segments.append(Segment(start, len(schedule), tuple(given)))
    return _with_statistics(step, schedule, segments)


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


def _ready(step: CapturedStep, schedule: Schedule) -> dict[StepOutput, int]:
    """For each gradient the position from which on it may leave; −1 before all.

    That is the last one that reads or writes it, or reads what it is the gradient of: an optimizer that runs in the
    gradient's hook changes that.
    """
    last = dict.fromkeys(step.storage_bytes, -1)
    for at, one in enumerate(schedule):
        if isinstance(one, Run):
            call = step.call[one.op]
            last.update(dict.fromkeys((*step.reads(call), *step.writes(call)), at))
    of = {(GRADIENT_OF.get(i.kind), i.target): step.values[i.value].storage for i in step.inputs}
    return {
        o: max(last[step.values[o.value].storage], last[of[o.kind, o.target]])
        for o in step.outputs
        if "gradient" in o.kind
    }
