"""A step beside gradients of earlier steps, to which autograd adds those that it gives."""

from __future__ import annotations

import math
from bisect import bisect
from collections.abc import Callable, Mapping, Sequence, Set
from dataclasses import dataclass, replace
from types import MappingProxyType
from typing import Any, Protocol

import torch

from rematplan.ir import Op, Tensor, TrainingGraph
from rematplan.planner.core.plan import Plan
from rematplan.planner.core.schedule import Free, Schedule
from rematplan.planner.core.simulator import resident_bytes
from rematplan.runtime.graph.allocator import allocated
from rematplan.runtime.graph.captured_step import CapturedStep
from rematplan.runtime.problem.loss_boundary import split_at_loss
from rematplan.runtime.problem.segments import gradient_segments

EARLIER = "earlier_gradients"
"""The input that stands for gradients of earlier steps, where a problem counts them."""


class Refinement(Protocol):
    """The search for a better plan of a step, which goes on while the step is run."""

    def begin(self, compiled: Callable[[StepPlan], Any]) -> None:
        """Begin the search. Each better plan is ``compiled`` before it counts as found, in another thread."""

    @property
    def ready(self) -> bool:
        """Whether a better plan has been found since the last was taken."""

    def take(self) -> tuple[StepPlan, Any]:
        """The better plan, and what ``compiled`` made of it."""

    @property
    def working(self) -> bool:
        """Whether the search goes on."""

    def wait(self, seconds: float | None = None) -> bool:
        """Wait until the search has ended, so many seconds at most; whether it has."""

    @property
    def seconds(self) -> float:
        """How long the search had taken when it was last heard of."""


@dataclass(frozen=True)
class StepPlan:
    """A plan and the step that it is of, which may have inverses that the captured one has not.

    ``spare``: see `spare_bytes`; empty where new gradients are charged to the end. ``gradients``: bytes of gradients of
    earlier steps that the plan's problem counts. ``refinement``: the search for a better plan, not begun yet.
    """

    step: CapturedStep
    plan: Plan
    spare: tuple[int, ...] = ()
    gradients: int = 0
    refinement: Refinement | None = None


def earlier_gradients(
    step: CapturedStep, named: Mapping[str, torch.Tensor] = MappingProxyType({})
) -> tuple[frozenset[str], int]:
    """The names of the parameters to whose gradients a step may add, and the bytes of all gradients that may be there,
    and of the statistics that the step gives, of which there may be earlier ones, too.

    Args:
        step: its own parameters are known by their names.
        named: all parameters of the model, by the names that steps know them by: those that want gradients may have
            some of other steps, though this one gives them none.
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
    """The problem beside bytes that others hold during the whole step, by a name for them: further inputs."""
    held = {name: size for name, size in held.items() if size}
    return replace(
        graph,
        tensors=(*graph.tensors, *(Tensor(name, size) for name, size in held.items())),
        inputs=(*graph.inputs, *held),
        fixed_split={**graph.fixed_split, **held},
    )


def adding_problem(step: CapturedStep, graph: TrainingGraph, names: Set[str]) -> TrainingGraph:
    """The problem of a step that frees each gradient of the parameters ``names`` as soon as it is computed.

    Autograd adds each to the gradient of earlier steps, whose bytes are charged outside of the problem. Zero-byte
    marker outputs force each gradient to be computed. `spare_bytes` deals with gradients that leave only when a segment
    ends.
    """
    added = _added(step, names)
    marks = {t: f"({t} added)" for t in graph.outputs if t in added and t in graph.producer}

    def marking(op: Op) -> Op:
        return replace(op, writes=(*op.writes, *(marks[t] for t in op.writes if t in marks)))

    return replace(
        graph,
        name=f"{graph.name} beside earlier gradients",
        tensors=(*graph.tensors, *(Tensor(mark, 0) for mark in marks.values())),
        outputs=tuple(marks.get(t, t) for t in graph.outputs),
        ops=tuple(map(marking, graph.ops)),
    )


def _added(step: CapturedStep, names: Set[str]) -> frozenset[str]:
    """The storages that hold nothing but gradients of these parameters, and no more bytes than those."""
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
    """What each step of a schedule of an `adding_problem` leaves of a budget; None if the schedule goes beyond it.

    A gradient waits for the end of its segment, and is charged here until then. Segments end early enough where they
    can; one op may have to run after a gradient is made and before it can leave.
    """
    spare = tuple(budget - held for held in resident_bytes(graph, schedule))
    waiting = waiting_bytes(step, schedule, spare, names)
    return spare if all(late <= left for late, left in zip(waiting, spare, strict=True)) else None


def waiting_bytes(
    step: CapturedStep, schedule: Schedule, spare: Sequence[int], names: Set[str]
) -> tuple[int, ...]:
    """At each step of a schedule of an `adding_problem` the bytes of gradients that it has freed, and that wait for the
    end of their segment. ``spare``: see `spare_bytes`."""
    own, added = split_at_loss(step, schedule), _added(step, names)
    left = [spare[at] for at in own.positions]
    freed = {one.tensor: at for at, one in enumerate(schedule) if isinstance(one, Free)}
    waiting = [0] * len(schedule)
    for segment in gradient_segments(step, own.schedule, own.turn, left, late=own.late):
        for storage in {step.values[o.value].storage for o in segment.outputs} & added & freed.keys():
            for at in own.positions[bisect(own.positions, freed[storage]) : segment.end]:
                waiting[at] += step.storage_bytes[storage]
    return tuple(waiting)
