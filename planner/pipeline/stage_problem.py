"""A stage of a pipeline as a planning problem, and the memory that the stage needs with a plan of this problem.

The problem is the forward and backward of one micro-batch while gradients of earlier micro-batches exist. Between
forward and backward, an op called the *boundary* represents the time in which other stages and other micro-batches run.
A split backward has a second boundary, between the ops for the input's gradient and those for the gradients of the
weights.

The bytes that a plan keeps across a boundary can be limited to κ by the workspace of the boundary op. For a budget b,
the workspace is b − inputs − κ − (bytes that the boundary writes). Then a schedule exceeds b at the boundary exactly if
it keeps more than κ. So all strategies and lower bounds can be used without changes.
"""

from __future__ import annotations

from collections.abc import Callable, Container, Iterable, Mapping, Sequence, Set
from dataclasses import dataclass, field, replace
from functools import cached_property
from itertools import accumulate
from typing import Any

from rematplan.ir import Op, TrainingGraph
from rematplan.planner.core.plan import Plan, plan_to_json
from rematplan.planner.core.schedule import Free, Run, Schedule
from rematplan.planner.core.simulator import resident_bytes
from rematplan.planner.pipeline.actions import StagePlan


@dataclass(frozen=True)
class StageProblem:
    """The planning problem of one stage of a pipeline, for one micro-batch.

    ``graph``: the ops of the stage's forward, then the op named ``boundary``, then the ops of its backward.
    ``weights``: in a split backward, the name of a second boundary op, between the ops for the input's gradient and
    those for the gradients of the weights; None if the backward is not split.

    ``states``: inputs that exist during the whole step (parameters, buffers). ``per_microbatch``: inputs of which each
    micro-batch needs its own contents from its forward to the end of its backward, such as random generator states, or
    a batch that is not stored elsewhere. ``tangents``: inputs that each micro-batch needs only in its backward (the
    gradients of the outputs). They are freed at the end of the backward, or of the I if the W does not read them.
    ``released``: whether only the backward has these inputs after an I. Then those inputs ``per_microbatch`` that the W
    does not read are freed at the end of the I, and each tangent is freed as soon as no later op of the W reads it.
    ``tangents_held``: a function that returns, for a schedule, the position from which on each tangent is freed as soon
    as no later op reads it, because only the backward has it; None: there is no such position. The bytes of all other
    inputs, such as receive buffers of torch, are counted in ``template``.

    ``between``: bytes outside of the graph that exist for each micro-batch from its forward to its backward, such as
    tensors that a loss saves. ``loss_forward``: bytes that the boundary op needs in addition to its workspace if it is
    counted to the forward, as the computation of a loss is. ``copies``: for the name of an op, the bytes that each
    micro-batch keeps from forward to backward if the op runs again after the boundary, such as the old content of a
    buffer or a random generator state. ``handed``: outputs of the forward that the next stage holds, because it is on
    the same rank. The next stage counts them, so this stage does not count them after its forward. ``freed``: outputs
    of the forward that torch frees once they are sent, and for each of them the ops that read it. If a plan runs none
    of these ops after the boundary, the output is not counted after the forward, except as a message that is being sent
    (``StagePlan.loose``). ``leaving``: tensors that are outputs of the graph, but are freed at the boundary, such as
    new contents of buffers.

    ``gradients``: for the name of each 0-byte marker, the name of a parameter's gradient. The op that writes the
    gradient also writes the marker; then the gradient is added to that of earlier micro-batches and freed. ``waiting``:
    a function that returns, for a schedule and each of its steps, the bytes of gradients that the schedule has freed,
    but that are not yet added; None: gradients are added at once. ``template``: the memory and times of the stage that
    do not depend on its plan.

    ``untaken``: a function that returns, for a schedule and each of its steps, the bytes of tensors that have arrived
    in a message, but that the schedule takes from it only later; None: there are none.

    ``reused``: a function that returns, for a schedule and each of its steps, the bytes that the schedule counts twice:
    an op has written its result into an operand that the schedule frees directly afterwards, and the schedule has not
    freed it yet. None: ops write into new tensors. ``reusable``: by the name of each op that may do so, the bytes of
    its largest such operand.
    """

    graph: TrainingGraph
    boundary: str
    states: tuple[str, ...] = ()
    per_microbatch: tuple[str, ...] = ()
    released: bool = False
    tangents: tuple[str, ...] = ()
    tangents_held: Callable[[Schedule], int] | None = None
    between: int = 0
    loss_forward: int = 0
    weights: str | None = None
    copies: Mapping[str, int] = field(default_factory=dict)
    handed: tuple[str, ...] = ()
    freed: Mapping[str, Set[str]] = field(default_factory=dict)
    leaving: tuple[str, ...] = ()
    gradients: Mapping[str, str] = field(default_factory=dict)
    waiting: Callable[[Schedule], Sequence[int]] | None = None
    untaken: Callable[[Schedule], Sequence[int]] | None = None
    reused: Callable[[Schedule], Sequence[int]] | None = None
    reusable: Mapping[str, int] = field(default_factory=dict)
    template: StagePlan = field(default_factory=lambda: StagePlan(0, 0, 0, 0))

    def bytes(self, names: Iterable[str]) -> int:
        """Return the sum of the sizes in bytes of the tensors with these names."""
        return sum(self.graph.size[name] for name in names)

    @property
    def gradient_bytes(self) -> int:
        """The bytes of all parameters' gradients that are summed over micro-batches."""
        return self.bytes(self.gradients.values())

    @property
    def least_kept(self) -> int:
        """The bytes that every plan keeps for a micro-batch between forward and backward: the tensors that the boundary
        op reads (except inputs, ``handed``, and ``freed`` and ``leaving``, which may be freed there), the inputs
        ``per_microbatch``, and ``between``."""
        gone = {*self.graph.inputs, *self.leaving, *self.handed, *self.freed}
        reads = {*self.graph.op[self.boundary].reads} - gone
        return self.bytes((*reads, *self.per_microbatch)) + self.between

    def resident(self, schedule: Schedule) -> list[int]:
        """Return the resident bytes at each step of a schedule, inputs of the graph included.

        A result that an op writes into an operand is not counted while the operand is. Gradients that wait to be added
        are not counted.
        """
        found = resident_bytes(self.graph, schedule)
        if self.untaken is not None:
            found = [bytes_ + more for bytes_, more in zip(found, self.untaken(schedule), strict=True)]
        if self.reused is not None:
            found = [bytes_ - twice for bytes_, twice in zip(found, self.reused(schedule), strict=True)]
        return found

    @cached_property
    def most_reused(self) -> int:
        """The bytes of the largest operand into which an op of the stage may write its result."""
        return max(self.reusable.values(), default=0)

    @cached_property
    def reusing(self) -> StageProblem:
        """This problem, as if all ops in ``reusable`` always wrote their results into operands (`assuming_reuse`)."""
        return self.assuming_reuse(self.reusable)

    def assuming_reuse(self, names: Container[str]) -> StageProblem:
        """Return this problem, as if the ops ``names``, as far as they are in ``reusable``, always wrote their results
        into operands.

        All other ops get larger workspaces instead, and budgets are larger by ``most_reused`` bytes. So if a plan needs
        at most b bytes and other ops overwrite nothing, its peak in the graph of the result is at most b +
        ``most_reused`` bytes. The converse does not hold: a schedule need not free the operand of such an op.
        """
        if not self.reusable:
            return self

        def limited(op: Op) -> Op:
            own = self.reusable.get(op.name, 0) if op.name in names else 0
            return replace(op, workspace=op.workspace + self.most_reused - own)

        ops, inverses = tuple(map(limited, self.graph.ops)), tuple(map(limited, self.graph.inverses))
        return replace(self, graph=replace(self.graph, ops=ops, inverses=inverses))

    @cached_property
    def late_inputs(self) -> tuple[str, ...]:
        """The inputs ``per_microbatch`` that exist in the W of every plan: those that ops after the second boundary
        read, or all if they are not ``released``."""
        return self.inputs_read_by(op for op in self.graph.ops if self.weights in op.reads)

    def inputs_read_by(self, ops: Iterable[Op]) -> tuple[str, ...]:
        """Return the inputs ``per_microbatch`` that exist while a W runs ``ops``: those that the ops read, or all if
        they are not ``released``."""
        read = {t for op in ops for t in op.reads}
        return tuple(t for t in self.per_microbatch if t in read or not self.released)

    def measured(self, plan: Plan) -> StagePlan:
        """Return the memory and times of this stage under a plan, computed from the plan's schedule and the ops'
        sizes and costs.

        The field ``plan`` of the result is the plan as JSON data.
        """
        return _measured(self, plan)

    def bounded(self, budget: int, kept: int, deferred: int | None = None) -> TrainingGraph:
        """Return the problem's graph with larger workspaces of the boundary ops: the op between forward and backward,
        and, in a split backward, the op between its two parts. So every plan whose peak is within ``budget`` bytes
        keeps only a limited number of bytes for a micro-batch across these ops.
        """
        bounds = {
            self.boundary: kept
            - self.bytes(self.per_microbatch)
            - self.between
            + self.bytes((*self.leaving, *self.handed, *self.freed))
        }
        if self.weights is not None and deferred is not None:
            gone = set(self.graph.op[self.weights].reads) - set(
                self.graph.inputs
            )  # freed with the I unless something reads it later
            bounds[self.weights] = deferred - self.bytes(self.late_inputs) + self.bytes(gone)

        def limited(op: Op) -> Op:
            if op.name not in bounds:
                return op
            writes = sum(self.graph.size[t] for t in op.writes)
            room = budget - self.graph.input_bytes - bounds[op.name] - writes
            return replace(op, workspace=max(op.workspace, room))

        return replace(self.graph, ops=tuple(map(limited, self.graph.ops)))

    def with_boundary_workspace(self, workspace: int) -> TrainingGraph:
        """Return the problem's graph with a workspace of ``workspace`` bytes of the op between forward and backward.

        The larger this workspace, the fewer bytes a plan with the smallest peak keeps between forward and backward.
        """
        ops = (replace(op, workspace=workspace) if op.name == self.boundary else op for op in self.graph.ops)
        return replace(self.graph, ops=tuple(ops))


def _measured(problem: StageProblem, plan: Plan) -> StagePlan:
    graph, schedule = problem.graph, plan.schedule
    beyond = [bytes_ - graph.input_bytes for bytes_ in problem.resident(schedule)]
    first = [own + left for own, left in zip(beyond, _freed_gradients(problem, schedule), strict=True)]
    if problem.waiting is not None:
        beyond = [own + late for own, late in zip(beyond, problem.waiting(schedule), strict=True)]
    runs = {step.op: at for at, step in reversed([*enumerate(schedule)]) if isinstance(step, Run)}
    boundary = runs[problem.boundary]
    handed = _resident_of(problem, schedule, problem.handed)
    again = {step.op for step in schedule[boundary:] if isinstance(step, Run)}
    loose = problem.bytes(t for t, readers in problem.freed.items() if again.isdisjoint(readers))
    gone = _resident_of(problem, schedule, problem.leaving)
    kept = _across(graph, problem.boundary, beyond[boundary]) + problem.between
    kept -= gone[boundary] + handed[boundary] + loose
    forward = [*beyond[:boundary], beyond[boundary] + problem.loss_forward]
    for series in (beyond, first):
        for at in range(boundary, len(schedule)):
            series[at] -= handed[at] + loose + (gone[at] if at > boundary else 0)
    split = len(schedule) if problem.weights is None else runs[problem.weights]
    tangents = _tangent_bytes(problem, schedule, split)
    back, first_back = (
        [own + given for own, given in zip(series, tangents, strict=True)] for series in (beyond, first)
    )
    saved = problem.bytes(problem.per_microbatch) + sum(n for op, n in problem.copies.items() if op in again)
    costs = [graph.op[step.op].cost if isinstance(step, Run) else 0.0 for step in schedule]
    late: dict[str, Any] = {}
    if problem.weights is not None:
        given = None if problem.tangents_held else tangents  # torch keeps them to the end of a B
        late = _split_figures(problem, schedule, split, back, first_back, given, saved)
        late["weight"] = sum(costs[split:])
    return replace(
        problem.template,
        kept_bytes=kept + saved,
        loose=loose,
        transient_forward=max([*forward, kept]) + saved,
        transient_backward=max([*back[boundary:split], kept + tangents[boundary]]) + saved,
        first_backward=max([*first_back[boundary:split], kept + tangents[boundary]]) + saved,
        gradients=problem.gradient_bytes,
        states=problem.template.states + problem.bytes(problem.states),
        forward=sum(costs[:boundary]),
        backward=sum(costs[boundary:split]),
        extra=plan.estimate.cost - graph.base_cost,
        plan=plan_to_json(plan),
        **late,
    )


def _across(graph: TrainingGraph, boundary: str, during: int) -> int:
    """Return the bytes that are resident before and after a boundary op: those during the op (``during``) without its
    workspace and what it writes."""
    op = graph.op[boundary]
    return during - op.workspace - sum(graph.size[t] for t in op.writes)


def _split_figures(
    problem: StageProblem,
    schedule: Schedule,
    split: int,
    beyond: list[int],
    first: list[int],
    tangents: Sequence[int] | None,
    saved: int,
) -> dict[str, Any]:
    """Return the fields of `StagePlan` that only a split backward has, by name: ``deferred_bytes``,
    ``deferred_input``, ``transient_weight``, ``first_weight``, ``whole`` and ``early_gradients``.

    The I ends with the frees that follow the second boundary op, and with that of inputs that are ``released``.
    """
    graph, start = problem.graph, split + 1
    while start < len(schedule) and isinstance(schedule[start], Free):
        start += 1
    across = beyond[split] - graph.op[problem.weights or ""].workspace
    deferred = beyond[start - 1] if start > split + 1 else across
    longer = _held_longer(problem, schedule, split, tangents)
    sooner = {t for step in schedule[:split] if isinstance(step, Run) for t in graph.op[step.op].writes}
    early = problem.bytes(gradient for mark, gradient in problem.gradients.items() if mark in sooner)
    firsts = [bytes_ - early for bytes_ in first]
    weight, first_weight = (max([deferred, *series[start:]]) for series in (beyond, firsts))
    in_whole = (
        (
            across + longer[split],
            *(own + more for own, more in zip(series[start:], longer[start:], strict=True)),
        )
        for series in (beyond, firsts)
    )
    whole = max(max(series) - most for series, most in zip(in_whole, (weight, first_weight), strict=True))
    late = problem.inputs_read_by(graph.op[step.op] for step in schedule[start:] if isinstance(step, Run))
    unread = problem.bytes(problem.per_microbatch) - problem.bytes(late)
    return {
        "deferred_bytes": deferred + saved - unread,
        "deferred_input": problem.bytes(late),
        "transient_weight": weight + saved - unread,
        "first_weight": first_weight + saved - unread,
        "whole": whole + unread,
        "early_gradients": early,
    }


def _held_longer(
    problem: StageProblem, schedule: Schedule, split: int, tangents: Sequence[int] | None
) -> list[int]:
    """Return, for each step of a schedule from ``split`` on, the bytes that a W has freed but a B holds to its end:
    outputs of the stage, and gradients of the stage's inputs and outputs. The values for earlier steps mean nothing.

    ``split``, ``tangents``: see `_split_figures`.
    """
    graph = problem.graph
    leave = set(graph.op[problem.weights or ""].reads) - {*graph.inputs, *problem.handed}
    frees = (
        graph.size[s.tensor] if isinstance(s, Free) and s.tensor in leave else 0 for s in schedule[split:]
    )
    freed = [0] * split + [*accumulate(frees)]
    if tangents is None:
        return freed
    return [left + tangents[split - 1] - now for left, now in zip(freed, tangents, strict=True)]


def _tangent_bytes(problem: StageProblem, schedule: Schedule, split: int) -> list[int]:
    """Return, for each step of a schedule, the bytes of tangents that exist if the step is in the backward.

    ``split``: the index of the second boundary op in the schedule, or the length of the schedule.
    """
    if not problem.tangents:
        return [0] * len(schedule)
    sizes, outputs = problem.graph.size, {*problem.graph.outputs, *problem.gradients.values()}
    held = problem.tangents_held(schedule) if problem.tangents_held else len(schedule)
    reads = {
        t: at
        for at, step in enumerate(schedule)
        if isinstance(step, Run)
        for t in problem.graph.op[step.op].reads
    }

    def end(t: str) -> int:
        if problem.tangents_held and t in reads and t not in outputs:
            return max(reads[t] + 1, min(held, split))
        if reads.get(t, 0) < split:
            return split
        return reads[t] + 1 if problem.released and t not in outputs else len(schedule)

    ends = [(end(t), sizes[t]) for t in problem.tangents]
    return [sum(size for until, size in ends if at < until) for at in range(len(schedule))]


def _resident_of(problem: StageProblem, schedule: Schedule, outputs: Iterable[str]) -> list[int]:
    """Return, for each step of a schedule from the boundary on, the resident bytes of some outputs of the forward."""
    sizes = problem.graph.size
    freed = {step.tensor: at for at, step in enumerate(schedule) if isinstance(step, Free)}
    ends = [(freed.get(t, len(schedule)), sizes[t]) for t in outputs]
    return [sum(size for until, size in ends if at < until) for at in range(len(schedule))]


def _freed_gradients(problem: StageProblem, schedule: Schedule) -> list[int]:
    """Return, for each step of a schedule, the bytes of parameters' gradients that are complete and that the schedule
    has freed. In the first backward of a step these bytes stay in memory, because later micro-batches add to them."""
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
