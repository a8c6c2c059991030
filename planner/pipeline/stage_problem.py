"""A stage of a pipeline as a planning problem for one micro-batch, and the memory that the stage needs with a
plan of it.

Other stages and micro-batches run in the *boundary* op between forward and backward. To limit what is kept
across it to κ within budget b, its workspace is b − inputs − κ − (bytes that it writes).
"""

from __future__ import annotations

from collections.abc import Callable, Container, Iterable, Mapping, Sequence, Set
from dataclasses import dataclass, field, replace
from functools import cached_property
from itertools import accumulate

from rematplan.ir import Op, TrainingGraph
from rematplan.planner.core.plan import Plan, plan_to_json
from rematplan.planner.core.schedule import Free, Run, Schedule
from rematplan.planner.core.simulator import resident_bytes
from rematplan.planner.pipeline.stage_plan import ActionTimes, HeldBytes, StagePlan, TransientBytes


@dataclass(frozen=True)
class StageProblem:
    """The planning problem of one stage, for one micro-batch: forward ops, the op ``boundary``, then backward
    ops.

    Functions of a schedule return one number of bytes per step, if nothing else is said; None: no bytes.
    """

    graph: TrainingGraph
    boundary: str
    states: tuple[str, ...] = ()
    """Inputs that exist during the whole step: parameters, buffers."""
    per_microbatch: tuple[str, ...] = ()
    """Inputs with contents of their own for each micro-batch, from its forward to its backward's end, such as
    random generator states.
    """
    released: bool = False
    """Whether an I frees inputs ``per_microbatch`` that its W does not read, and a W frees tangents after
    their last reader.
    """
    tangents: tuple[str, ...] = ()
    """Gradients of outputs. They are freed at the backward's end, or at the end of I if W does not read them."""
    tangents_held: Callable[[Schedule], int] | None = None
    """For a schedule, the position from which on tangents are freed after their last reader; None: there is
    no such position.
    """
    between: int = 0
    """Bytes outside of the graph for each micro-batch from its forward to its backward, such as what a loss saves."""
    loss_forward: int = 0
    """Bytes that the boundary op needs beyond its workspace if it counts to the forward."""
    weights: str | None = None
    """The boundary op between I and W; None if the backward is not split."""
    copies: Mapping[str, int] = field(default_factory=dict)
    """By op, bytes kept from forward to backward if the op runs after the boundary, such as a buffer's old
    content.
    """
    handed: tuple[str, ...] = ()
    """Outputs of the forward that the next stage, on the same rank, counts. They are not counted here after
    the forward.
    """
    freed: Mapping[str, Set[str]] = field(default_factory=dict)
    """Outputs that torch frees after they are sent, with their readers. If none runs after the boundary, they
    count as ``HeldBytes.loose``.
    """
    leaving: tuple[str, ...] = ()
    """Outputs of the graph that are freed at the boundary, such as new contents of buffers."""
    gradients: Mapping[str, str] = field(default_factory=dict)
    """By 0-byte marker, the parameter's gradient that the same op writes. It is then added to that of earlier
    micro-batches and freed.
    """
    waiting: Callable[[Schedule], Sequence[int]] | None = None
    """For a schedule, bytes of gradients that it has freed but that are not yet added."""
    untaken: Callable[[Schedule], Sequence[int]] | None = None
    """For a schedule, bytes of tensors that have arrived in a message but are taken from it later."""
    reused: Callable[[Schedule], Sequence[int]] | None = None
    """For a schedule, bytes that it counts twice: a result in an operand that the schedule frees next."""
    reusable: Mapping[str, int] = field(default_factory=dict)
    """By op that may write into an operand, the bytes of its largest such operand."""
    template: StagePlan = field(default_factory=lambda: StagePlan(0))
    """The memory and times of the stage that do not depend on its plan."""

    def bytes(self, names: Iterable[str]) -> int:
        """Return the sum of the sizes in bytes of the tensors with these names."""
        return sum(self.graph.size[name] for name in names)

    @property
    def gradient_bytes(self) -> int:
        """The bytes of all parameters' gradients that are summed over micro-batches."""
        return self.bytes(self.gradients.values())

    @property
    def least_kept(self) -> int:
        """A lower bound of the bytes kept per micro-batch from forward to backward: what the boundary op
        reads and must keep, ``per_microbatch``, ``between``.
        """
        gone = {*self.graph.inputs, *self.leaving, *self.handed, *self.freed}
        reads = {*self.graph.op[self.boundary].reads} - gone
        return self.bytes((*reads, *self.per_microbatch)) + self.between

    def resident(self, schedule: Schedule) -> list[int]:
        """Return the resident bytes at each step of a schedule, inputs of the graph included, gradients that
        wait to be added excluded.

        A result that an op writes into an operand counts once.
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
        """Return this problem as if those ops in ``names`` that are ``reusable`` wrote their results into operands. A
        plan that then needs b bytes has a peak of at most b + `most_reused` in the returned problem."""
        if not self.reusable:
            return self

        # The other ops get `most_reused` more workspace, and budgets as much more. A plan that needs b bytes
        # then has a peak of at most b + `most_reused`. The converse fails: a schedule need not free the
        # operand.
        def limited(op: Op) -> Op:
            own = self.reusable.get(op.name, 0) if op.name in names else 0
            return replace(op, workspace=op.workspace + self.most_reused - own)

        ops, inverses = tuple(map(limited, self.graph.ops)), tuple(map(limited, self.graph.inverses))
        return replace(self, graph=replace(self.graph, ops=ops, inverses=inverses))

    @cached_property
    def late_inputs(self) -> tuple[str, ...]:
        """The inputs ``per_microbatch`` that the W of each plan needs: those that ops behind the second
        boundary read, or all if not ``released``.
        """
        return self.inputs_read_by(op for op in self.graph.ops if self.weights in op.reads)

    def inputs_read_by(self, ops: Iterable[Op]) -> tuple[str, ...]:
        """Return the inputs ``per_microbatch`` that exist while a W runs ``ops``: those that the ops read, or all if
        they are not ``released``."""
        read = {t for op in ops for t in op.reads}
        return tuple(t for t in self.per_microbatch if t in read or not self.released)

    def measured(self, plan: Plan) -> StagePlan:
        """Return the memory and times of this stage under a plan, and the plan as JSON data."""
        graph, schedule = self.graph, plan.schedule
        runs = {step.op: at for at, step in reversed([*enumerate(schedule)]) if isinstance(step, Run)}
        boundary = runs[self.boundary]
        split = len(schedule) if self.weights is None else runs[self.weights]
        again = {step.op for step in schedule[boundary:] if isinstance(step, Run)}
        loose = self.bytes(t for t, readers in self.freed.items() if again.isdisjoint(readers))
        # Bytes at each step: the stage's without inputs, those of them that do not count as the backward's, tangents.
        own = [bytes_ - graph.input_bytes for bytes_ in self.resident(schedule)]
        handed = _resident_of(self, schedule, self.handed, boundary)
        leaving = _resident_of(self, schedule, self.leaving, boundary + 1)
        gone = [
            a + b + loose * (at >= boundary) for at, (a, b) in enumerate(zip(handed, leaving, strict=True))
        ]
        tangents = _tangent_bytes(self, schedule, split)
        # In the first backward, gradients stay that later ones add to earlier ones and free.
        waiting = self.waiting(schedule) if self.waiting else [0] * len(schedule)
        first, later = (
            [
                more + bytes_ - less + given
                for more, bytes_, less, given in zip(held, own, gone, tangents, strict=True)
            ]
            for held in (_freed_gradients(self, schedule), waiting)
        )
        left = _resident_of(self, schedule, self.leaving, boundary)[boundary]
        # Resident before and after the boundary op, so without its workspace and what it writes.
        op = graph.op[self.boundary]
        kept = own[boundary] - gone[boundary] - left - op.workspace - self.bytes(op.writes) + self.between
        saved = self.bytes(self.per_microbatch) + sum(n for op, n in self.copies.items() if op in again)
        held = HeldBytes(kept + saved, loose=loose, gradients=self.gradient_bytes)
        transients = TransientBytes(
            forward=max([*own[:boundary], own[boundary] + self.loss_forward, kept]) + saved,
            backward=max([*later[boundary:split], kept + tangents[boundary]]) + saved,
            first_backward=max([*first[boundary:split], kept + tangents[boundary]]) + saved,
        )
        if self.weights is not None:
            given = None if self.tangents_held else tangents  # torch keeps them to the end of a B
            deferred, late = _split_figures(self, schedule, split, later, first, given, saved)
            held, transients = replace(held, **deferred), replace(transients, **late)
        costs = [graph.op[step.op].cost if isinstance(step, Run) else 0.0 for step in schedule]
        parts = costs[:boundary], costs[boundary:split], costs[split:]
        forward, backward, weights = (sum(part, 0.0) for part in parts)
        return replace(
            self.template.adding(states=self.bytes(self.states)),
            held=held,
            transients=transients,
            times=ActionTimes(forward, backward, weights, plan.estimate.cost - graph.base_cost),
            plan=plan_to_json(plan),
        )

    def bounded(self, budget: int, kept: int, deferred: int | None = None) -> TrainingGraph:
        """Return the graph with boundary workspaces such that plans within ``budget`` bytes, inputs included, keep at
        most ``kept`` bytes from forward to backward.

        ``deferred``: the same limit between I and W; None, or without a split backward: no such limit.
        """
        bounds = {
            self.boundary: kept
            - self.bytes(self.per_microbatch)
            - self.between
            + self.bytes((*self.leaving, *self.handed, *self.freed))
        }
        if self.weights is not None and deferred is not None:
            # Freed with the I unless something reads it later.
            gone = set(self.graph.op[self.weights].reads) - set(self.graph.inputs)
            bounds[self.weights] = deferred - self.bytes(self.late_inputs) + self.bytes(gone)

        def limited(op: Op) -> Op:
            if op.name not in bounds:
                return op
            writes = sum(self.graph.size[t] for t in op.writes)
            room = budget - self.graph.input_bytes - bounds[op.name] - writes
            return replace(op, workspace=max(op.workspace, room))

        return replace(self.graph, ops=tuple(map(limited, self.graph.ops)))

    def with_boundary_workspace(self, workspace: int) -> TrainingGraph:
        """Return the graph with this workspace of the boundary op. If it is large, plans with small peaks
        keep few bytes across it.
        """
        ops = (replace(op, workspace=workspace) if op.name == self.boundary else op for op in self.graph.ops)
        return replace(self.graph, ops=tuple(ops))


def _split_figures(
    problem: StageProblem,
    schedule: Schedule,
    split: int,
    beyond: list[int],
    first: list[int],
    tangents: Sequence[int] | None,
    saved: int,
) -> tuple[dict[str, int], dict[str, int]]:
    """Return the fields of `HeldBytes` and of `TransientBytes` that only a split backward has, by name. ``split``: the
    step of the second boundary. ``beyond``, ``first``: the bytes at each step without inputs, ``first`` in the step's
    first backward. ``tangents``: by step, or None if a B frees them early. ``saved``: further bytes that F keeps."""
    graph, start = problem.graph, split + 1
    # The I ends with the frees that follow the second boundary op.
    while start < len(schedule) and isinstance(schedule[start], Free):
        start += 1
    across = beyond[split] - graph.op[problem.weights or ""].workspace
    deferred = beyond[start - 1] if start > split + 1 else across
    longer = _held_longer(problem, schedule, split, tangents)
    sooner = {t for step in schedule[:split] if isinstance(step, Run) for t in graph.op[step.op].writes}
    early = problem.bytes(gradient for mark, gradient in problem.gradients.items() if mark in sooner)
    firsts = [bytes_ - early for bytes_ in first]
    weight, first_weight = (max([deferred, *series[start:]]) for series in (beyond, firsts))
    # In a B torch frees later what an I frees at its end: `whole` is by how much W then needs more than on its own.
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
    kept = saved - unread
    return (
        {"deferred": deferred + kept, "deferred_input": problem.bytes(late), "early_gradients": early},
        {"weight": weight + kept, "first_weight": first_weight + kept, "whole": whole + unread},
    )


def _held_longer(
    problem: StageProblem, schedule: Schedule, split: int, tangents: Sequence[int] | None
) -> list[int]:
    """Return, for steps from ``split`` on, the bytes of outputs and of gradients that a W has freed but a B holds to
    its end. Values of earlier steps mean nothing. ``tangents``: by step; None if a B frees them early, too."""
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
    """Return the bytes of tangents at each step, as if all steps were in the backward. ``split``: the index of the
    second boundary, or the schedule's length without one."""
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


def _resident_of(problem: StageProblem, schedule: Schedule, outputs: Iterable[str], start: int) -> list[int]:
    """Return, by step of a schedule, the bytes of ``outputs`` that are not yet freed; 0 before the step ``start``."""
    sizes = problem.graph.size
    freed = {step.tensor: at for at, step in enumerate(schedule) if isinstance(step, Free)}
    ends = [(freed.get(t, len(schedule)), sizes[t]) for t in outputs]
    return [sum(size for until, size in ends if start <= at < until) for at in range(len(schedule))]


def _freed_gradients(problem: StageProblem, schedule: Schedule) -> list[int]:
    """Return, for each step, the bytes of the parameters' complete gradients that the schedule has freed so far."""
    # In a step's first backward these bytes stay, because later micro-batches add to them.
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
