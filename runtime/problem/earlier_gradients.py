"""Planning problems of steps to whose gradients autograd adds those of earlier steps (gradient accumulation).

The earlier gradients take memory during the whole step. New ones may be freed as soon as they are added.
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
    """Return the names of the parameters whose gradients a step computes, and the bytes that gradients and statistics
    of earlier steps may occupy while it runs. ``named``: the model's parameters, which may be more than the step's."""
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
    """Return a problem with an input for each entry of ``held`` that is not 0 bytes: memory that others keep during
    the whole step."""
    held = {name: size for name, size in held.items() if size}
    return replace(
        graph,
        tensors=(*graph.tensors, *(Tensor(name, size) for name, size in held.items())),
        inputs=(*graph.inputs, *held),
        fixed_split={**graph.fixed_split, **held},
    )


def adding_problem(step: CapturedStep, graph: TrainingGraph, names: Set[str]) -> TrainingGraph:
    """Return the problem of a step with earlier gradients, in which new gradients of the parameters ``names`` may be
    freed once computed, if their storage contains nothing else. It counts neither earlier gradients
    (`earlier_gradients`) nor freed new ones that are not added yet (`spare_bytes`)."""
    added = _added(step, names)
    # An output of zero bytes replaces each gradient, so that it is still computed. Its op runs once, since
    # each run would add it again.
    marks = {t: f"({t} added)" for t in graph.outputs if t in added and t in graph.producer}

    def marking(op: Op) -> Op:
        return replace(op, writes=(*op.writes, *(marks[t] for t in op.writes if t in marks)))

    return replace(
        graph,
        name=f"{graph.name} with earlier gradients",
        tensors=(*graph.tensors, *(Tensor(mark, 0) for mark in marks.values())),
        outputs=tuple(marks.get(t, t) for t in graph.outputs),
        ops=tuple(map(marking, graph.ops)),
        never_rerun=graph.once(*(graph.ops[graph.producer[t]].name for t in marks)),
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
    """Return, by position in ``schedule``, the unused bytes of ``budget``; None if the schedule, with freed gradients
    of ``names`` that are not added yet, needs more."""
    spare = tuple(budget - held for held in resident_bytes(graph, schedule))
    # Autograd takes a freed gradient when its segment ends. Segments end early where the budget requires it,
    # but not between every two ops.
    waiting = waiting_bytes(step, schedule, spare, names)
    return spare if all(late <= left for late, left in zip(waiting, spare, strict=True)) else None


def waiting_bytes(
    step: CapturedStep, schedule: Schedule, spare: Sequence[int], names: Set[str]
) -> tuple[int, ...]:
    """Return, by position, the bytes of gradients of ``names`` that the schedule has freed but whose segment has not
    ended. ``spare``, unused bytes by position, decides where segments end."""
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
    """Return where the first segment of the backward ends. Until then autograd holds the gradients of the outputs."""
    own, segments = _segments(step, schedule, spare)
    return (*own.positions, len(schedule))[segments[0].end]


def _segments(
    step: CapturedStep, schedule: Schedule, spare: Sequence[int]
) -> tuple[SplitSchedule, tuple[Segment, ...]]:
    """Return the part of a schedule that a compiled plan runs, and the segments of its backward, with positions in
    that part."""
    own = split_at_loss(step, schedule)
    left = [spare[at] for at in own.positions]
    return own, gradient_segments(step, own.schedule, own.boundary, left, late=own.late)
