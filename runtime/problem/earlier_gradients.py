"""Planning problems of steps that begin while parameters have gradients of earlier steps (gradient accumulation).

When the parameters have gradients of earlier steps already, autograd adds the gradients of a further step to them. The
earlier gradients take memory during the whole step. The new ones may be freed as soon as they are added.
"""

from __future__ import annotations

import math
from bisect import bisect
from collections.abc import Mapping, Sequence, Set
from dataclasses import replace
from types import MappingProxyType

import torch

from rematplan.ir import Op, Tensor, TrainingGraph
from rematplan.planner.core.schedule import Free, Schedule
from rematplan.planner.core.simulator import resident_bytes
from rematplan.runtime.graph.allocator_rounding import allocated
from rematplan.runtime.graph.captured_step import CapturedStep
from rematplan.runtime.problem.backward_segments import Segment, gradient_segments
from rematplan.runtime.problem.loss_boundary import SplitSchedule, split_at_loss

EARLIER = "earlier_gradients"
"""The name of the problem's input that represents the gradients of earlier steps."""


def earlier_gradients(
    step: CapturedStep, named: Mapping[str, torch.Tensor] = MappingProxyType({})
) -> tuple[frozenset[str], int]:
    """Return the names of the parameters whose gradients a step computes, and the bytes that gradients of earlier steps
    may occupy while the step runs.
    """
    targets = frozenset(o.target for o in step.outputs if o.kind == "gradient")
    own = {i.target: _bytes(step, i.value) for i in step.inputs if i.target in targets}
    known = {id(named[name]) for name in own if name in named}
    others = {
        id(t): allocated(t.nbytes, t.device)
        for t in named.values()
        if t.requires_grad and t.is_leaf and id(t) not in known
    }
    statistics = sum(_bytes(step, o.value) for o in step.outputs if o.kind == "statistic")
    return targets, sum(own.values()) + sum(others.values()) + statistics


def holding(graph: TrainingGraph, held: Mapping[str, int]) -> TrainingGraph:
    """Return a planning problem with one more input for each entry of ``held``. Each of these inputs represents memory
    that something other than the step keeps allocated during the whole step.
    """
    held = {name: size for name, size in held.items() if size}
    return replace(
        graph,
        tensors=(*graph.tensors, *(Tensor(name, size) for name, size in held.items())),
        inputs=(*graph.inputs, *held),
        fixed_split={**graph.fixed_split, **held},
    )


def adding_problem(step: CapturedStep, graph: TrainingGraph, names: Set[str]) -> TrainingGraph:
    """Return the planning problem of a step that begins while parameters have gradients of earlier steps. A plan may
    then free each new gradient as soon as it is computed, since autograd adds it to the earlier one.

    In the returned problem an output of zero bytes replaces each such gradient, so that the gradient is still computed.
    Ops that compute such a gradient may run only once, since each run would add it again.
    A gradient stays an output if its storage contains anything else, or is larger than the gradients in it. The problem
    does not count the bytes of the earlier gradients. It does not count new gradients that are freed but not yet added
    either: `spare_bytes` does.
    """
    added = _added(step, names)
    marks = {t: f"({t} added)" for t in graph.outputs if t in added and t in graph.producer}

    def marking(op: Op) -> Op:
        return replace(op, writes=(*op.writes, *(marks[t] for t in op.writes if t in marks)))

    return replace(
        graph,
        name=f"{graph.name} with earlier gradients",
        tensors=(*graph.tensors, *(Tensor(mark, 0) for mark in marks.values())),
        outputs=tuple(marks.get(t, t) for t in graph.outputs),
        ops=tuple(map(marking, graph.ops)),
        never_rerun=tuple(
            dict.fromkeys((*graph.never_rerun, *(graph.ops[graph.producer[t]].name for t in marks)))
        ),
    )


def _added(step: CapturedStep, names: Set[str]) -> frozenset[str]:
    """Return the names of the step's storages that contain nothing but gradients of the parameters ``names``, and that
    are no larger than these gradients together."""
    bytes_of = {i.target: _bytes(step, i.value) for i in step.inputs if i.kind == "parameter"}
    held: dict[str, float] = {}
    for o in step.outputs:
        its = bytes_of.get(o.target, 0) if o.kind == "gradient" and o.target in names else -math.inf
        storage = step.values[o.value].storage
        held[storage] = held.get(storage, 0) + its
    return frozenset(s for s, most in held.items() if step.storage_bytes[s] <= most)


def _bytes(step: CapturedStep, value: str) -> int:
    fake = step.values[value].fake
    return allocated(fake.nbytes, fake.device)


def spare_bytes(
    step: CapturedStep, graph: TrainingGraph, schedule: Schedule, budget: int, names: Set[str]
) -> tuple[int, ...] | None:
    """Return, for each position of a schedule, how many bytes of the budget are unused there. Return None if gradients
    that the schedule has freed, but that autograd has not taken yet, need more than that at some position.

    Autograd takes the gradients of a segment (a part of the backward) when the segment ends. Until then, a gradient
    stays allocated even if the schedule has freed it. Segments end early where the budget requires it. That can fail,
    because a segment cannot end between every two ops.
    """
    spare = tuple(budget - held for held in resident_bytes(graph, schedule))
    waiting = waiting_bytes(step, schedule, spare, names)
    return spare if all(late <= left for late, left in zip(waiting, spare, strict=True)) else None


def waiting_bytes(
    step: CapturedStep, schedule: Schedule, spare: Sequence[int], names: Set[str]
) -> tuple[int, ...]:
    """Return, for each position of a schedule, the bytes of gradients that the schedule has freed and that are still
    allocated because their segment (a part of the backward) has not ended.
    """
    added = _added(step, names)
    own, segments = _segments(step, schedule, spare)
    freed = {one.tensor: at for at, one in enumerate(schedule) if isinstance(one, Free)}
    waiting = [0] * len(schedule)
    for segment in segments:
        for storage in {step.values[o.value].storage for o in segment.outputs} & added & freed.keys():
            for at in own.positions[bisect(own.positions, freed[storage]) : segment.end]:
                waiting[at] += step.storage_bytes[storage]
    return tuple(waiting)


def end_of_first_segment(step: CapturedStep, schedule: Schedule, spare: Sequence[int]) -> int:
    """Return the position in a schedule at which the first segment of its backward ends. Until then autograd holds the
    gradients of the outputs, even if no later op reads them.

    ``step``, ``schedule``, ``spare``: as for `waiting_bytes`.
    """
    own, segments = _segments(step, schedule, spare)
    return (*own.positions, len(schedule))[segments[0].end]


def _segments(
    step: CapturedStep, schedule: Schedule, spare: Sequence[int]
) -> tuple[SplitSchedule, tuple[Segment, ...]]:
    """Return the part of a schedule that a compiled plan runs, and the segments of its backward, whose positions are
    those in this part. ``spare``: as for `waiting_bytes`."""
    own = split_at_loss(step, schedule)
    left = [spare[at] for at in own.positions]
    return own, gradient_segments(step, own.schedule, own.boundary, left, late=own.late)
