"""A stage of a pipeline as a planning problem, and what a plan of it holds from action to action.

The problem is one micro-batch's forward and backward, beside gradients of earlier micro-batches, with an op that stands
for all that happens between the two: the *boundary*. A split backward has a second one, between what the input's
gradient needs and the rest.

What a plan holds at a boundary is bounded by the boundary's workspace: with κ bytes allowed there and b in all, a
workspace of b − inputs − κ − (what the boundary writes) makes exactly those schedules fit b that hold at most κ. Every
strategy and every proof then serves as it is.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import accumulate
from typing import Any

from rematplan.ir import Op, TrainingGraph
from rematplan.planner.core.plan import Plan, plan_to_json
from rematplan.planner.core.schedule import Free, Run, Schedule
from rematplan.planner.core.simulator import resident_bytes
from rematplan.planner.pipeline.actions import StagePlan


@dataclass(frozen=True)
class StageProblem:
    """One stage.

    ``graph``: its ops are in three parts, the ``boundary`` and ``weights`` ops between them; without ``weights`` in
    two. ``states``: of its inputs those that are there for the whole step (parameters, buffers). ``held``: those that
    each micro-batch has by itself from its forward to the end of its backward (a batch that nobody else keeps,
    generator states). ``given``: those that each micro-batch has only in its backward, the outputs' gradients. Other
    inputs are charged elsewhere, such as buffers that torch receives into. ``between``: bytes that somebody else holds
    for a micro-batch from its forward to its backward, such as what a loss saves.

    ``copies``: of an op the bytes that are kept from forward to backward for a micro-batch where it runs again after
    the boundary: a buffer as it was, or the state of a generator.
    ``leaving``: tensors that are kept to the end of the problem, but leave at the boundary, such as new buffers.
    ``gradients``: of each marker that an op writes together with a gradient, the gradient, which is added to an earlier
    one and goes; ``waiting`` gives of a schedule, at each step, the bytes of those that are freed and wait to go.
    ``template``: the stage's other figures, for `measured`.
    """

    graph: TrainingGraph
    boundary: str
    states: tuple[str, ...] = ()
    held: tuple[str, ...] = ()
    given: tuple[str, ...] = ()
    between: int = 0
    weights: str | None = None
    copies: Mapping[str, int] = field(default_factory=dict)
    leaving: tuple[str, ...] = ()
    gradients: Mapping[str, str] = field(default_factory=dict)
    waiting: Callable[[Schedule], Sequence[int]] | None = None
    template: StagePlan = field(default_factory=lambda: StagePlan(0, 0, 0, 0))

    def bytes(self, names: Iterable[str]) -> int:
        """Of tensors of the graph."""
        return sum(self.graph.size[name] for name in names)

    @property
    def gradient_bytes(self) -> int:
        """Of all gradients that are added to."""
        return self.bytes(self.gradients.values())

    @property
    def least_kept(self) -> int:
        """What every plan keeps for a micro-batch at the boundary: what that reads."""
        reads = {*self.graph.op[self.boundary].reads} - {*self.graph.inputs, *self.leaving}
        return self.bytes((*reads, *self.held)) + self.between

    def measured(self, plan: Plan) -> StagePlan:
        """What the plan holds and takes."""
        return _measured(self, plan)

    def bounded(self, budget: int, kept: int, deferred: int | None = None) -> TrainingGraph:
        """The problem of plans that hold at most ``kept`` bytes at the boundary and ``deferred`` at the second one,
        within a peak of ``budget`` (that of the graph, all of its inputs included)."""
        bounds = {self.boundary: kept - self.bytes(self.held) - self.between + self.bytes(self.leaving)}
        if self.weights is not None and deferred is not None:
            gone = set(self.graph.op[self.weights].reads) - set(
                self.graph.inputs
            )  # with the I, if nothing reads it
            bounds[self.weights] = deferred - self.bytes(self.held) + self.bytes(gone)

        def limited(op: Op) -> Op:
            if op.name not in bounds:
                return op
            writes = sum(self.graph.size[t] for t in op.writes)
            room = budget - self.graph.input_bytes - bounds[op.name] - writes
            return replace(op, workspace=max(op.workspace, room))

        return replace(self.graph, ops=tuple(map(limited, self.graph.ops)))

    def with_room(self, workspace: int) -> TrainingGraph:
        """The problem with so many bytes of workspace at the boundary: the least peak of its plans weighs what they
        keep against what they need besides."""
        ops = (replace(op, workspace=workspace) if op.name == self.boundary else op for op in self.graph.ops)
        return replace(self.graph, ops=tuple(ops))


def _measured(problem: StageProblem, plan: Plan) -> StagePlan:
    graph, schedule = problem.graph, plan.schedule
    beyond = [bytes_ - graph.input_bytes for bytes_ in resident_bytes(graph, schedule)]
    first = [own + left for own, left in zip(beyond, _made(problem, schedule), strict=True)]
    if problem.waiting is not None:
        beyond = [own + late for own, late in zip(beyond, problem.waiting(schedule), strict=True)]
    runs = {step.op: at for at, step in reversed([*enumerate(schedule)]) if isinstance(step, Run)}
    turn = runs[problem.boundary]
    gone = problem.bytes(problem.leaving)
    beyond[turn + 1 :], first[turn + 1 :] = (
        [bytes_ - gone for bytes_ in series[turn + 1 :]] for series in (beyond, first)
    )
    split = len(schedule) if problem.weights is None else runs[problem.weights]
    given = problem.bytes(problem.given)
    again = {step.op for step in schedule[turn:] if isinstance(step, Run)}
    held = problem.bytes(problem.held) + sum(n for op, n in problem.copies.items() if op in again)
    kept = _across(graph, problem.boundary, beyond[turn]) + held + problem.between - gone
    costs = [graph.op[step.op].cost if isinstance(step, Run) else 0.0 for step in schedule]
    late: dict[str, Any] = {}
    if problem.weights is not None:
        late = _split_figures(problem, schedule, split, beyond, first, held) | {"weight": sum(costs[split:])}
    return replace(
        problem.template,
        kept_bytes=kept,
        transient_forward=max([*beyond[: turn + 1], kept - held]) + held,
        transient_backward=max([*beyond[turn:split], kept - held]) + held + given,
        first_backward=max([*first[turn:split], kept - held]) + held + given,
        gradients=problem.gradient_bytes,
        states=problem.template.states + problem.bytes(problem.states),
        forward=sum(costs[:turn]),
        backward=sum(costs[turn:split]),
        extra=plan.estimate.cost - graph.base_cost,
        plan=plan_to_json(plan),
        **late,
    )


def _across(graph: TrainingGraph, boundary: str, during: int) -> int:
    """The bytes that are held across a boundary op, given those that there are while it runs."""
    op = graph.op[boundary]
    return during - op.workspace - sum(graph.size[t] for t in op.writes)


def _split_figures(
    problem: StageProblem, schedule: Schedule, split: int, beyond: list[int], first: list[int], held: int
) -> dict[str, Any]:
    """What a split stage holds between I and W, and in W. What the second boundary reads, and nothing after it, goes
    with the I."""
    graph, start = problem.graph, split + 1
    while start < len(schedule) and isinstance(schedule[start], Free):
        start += 1
    across = beyond[split] - graph.op[problem.weights or ""].workspace
    deferred = beyond[start - 1] if start > split + 1 else across
    late = {t for step in schedule[start:] if isinstance(step, Run) for t in graph.op[step.op].reads}
    own = held + problem.bytes(late.intersection(problem.given))
    return {
        "deferred_bytes": deferred + own,
        "transient_weight": max([deferred, *beyond[start:]]) + own,
        "first_weight": max([deferred, *first[start:]]) + own,
        "whole": across - deferred,
    }


def _made(problem: StageProblem, schedule: Schedule) -> list[int]:
    """At each step the bytes of the gradients that have left, which in a first backward are the ones to be added to."""
    marks, sizes = problem.gradients, problem.graph.size
    owner = {gradient: mark for mark, gradient in marks.items()}
    change = [0] * (len(schedule) + 1)
    made: set[str] = set()
    for at, step in enumerate(schedule):
        if isinstance(step, Run):
            made.update(mark for mark in problem.graph.op[step.op].writes if mark in marks)
        elif owner.get(step.tensor) in made:
            change[at] += sizes[step.tensor]
    return list(accumulate(change[:-1]))
