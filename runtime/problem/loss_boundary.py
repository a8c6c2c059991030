"""The turn of a step from forward to backward, where its outputs leave for a loss and their gradients come back."""

from __future__ import annotations

from bisect import bisect
from dataclasses import dataclass, replace

import torch

from rematplan.ir import Op, Tensor, TrainingGraph
from rematplan.planner.core.lanes import Lanes
from rematplan.planner.core.schedule import Free, Run, Schedule, runs_of
from rematplan.runtime.graph.allocator import allocated
from rematplan.runtime.graph.captured_step import CapturedStep
from rematplan.runtime.graph.own_losses import in_own_losses
from rematplan.runtime.problem.layout_copies import NONE, Copies

OLD_BUFFERS = "old_buffers"
"""The tensor that stands for the copies of buffers as they were before the step."""
LOSS = "(loss)"
"""The op that stands for what is done with the outputs until their gradients come, and its tensor, which stands for
copies of these."""
LOSS_VALUE = "(loss value)"
"""The tensor of that op which stands for what of a loss stays until the step ends."""
OPTIMIZER = "(optimizer)"
"""The op that stands for the optimizer's step, where a problem has it, and its tensor without bytes."""
WEIGHTS = "(weight gradients)"
"""The op that stands for what happens between the input's gradient and the rest of a split backward, and its tensor."""
OUTSIDE = (LOSS, OPTIMIZER, WEIGHTS)
"""Ops that others run."""
COPIES = 5
"""Tensors of the outputs' size, in float32 at least, that almost every loss does with at its peak, the gradients of the
outputs among them: the mean of squares, l1, dice and divergences hold four, a squared difference written out five."""
FEWER = 4
"""As many where the outputs are large. Cross entropy and a mean squared error hold three."""
AMPLE_SHARE = 1 / 8
"""Share of a step's peak up to which `COPIES` are set aside."""
SCALARS = 8
"""Tensors of one number that a loss has besides: a sum of weights, a temperature, a penalty."""


@dataclass(frozen=True, slots=True)
class LossMemory:
    """Bytes that a loss holds beside the outputs and their gradients.

    ``peak``: at its peak. ``kept``: of these until the step ends. Whoever calls the backward holds the loss and its
    gradient meanwhile, and the one number that `mse_loss` and `smooth_l1_loss` give lies in a storage of the outputs'
    size.
    """

    peak: int
    kept: int

    @classmethod
    def of_peak(cls, step: CapturedStep, peak: int, used: frozenset[str] = frozenset()) -> LossMemory:
        """For a loss of which only the peak is known. ``used``: the positions of outputs that it does not read."""
        scalars = 2 * _scalar(step)
        return cls(peak, max(scalars, min(peak, _each(step, used) + scalars)))

    @classmethod
    def of_copies(cls, step: CapturedStep, copies: float, used: frozenset[str] = frozenset()) -> LossMemory:
        """For a loss of so many tensors of the outputs' size."""
        given = sum(allocated(fake.nbytes, fake.device) for fake in _read(step, used))
        more = max(0, int(copies * _each(step, used)) - given)
        return cls.of_peak(step, more + SCALARS * _scalar(step), used)

    @classmethod
    def usual(cls, step: CapturedStep, peak: int) -> LossMemory:
        """For a loss of which nothing is known.

        A scalar among the outputs is taken for a loss of the model's own, and what it is made of for used by that:
        there are none for these, unless a gradient of theirs came before. An auxiliary loss that is made of something
        else leaves the other outputs theirs.

        ``peak``: the step's without recomputation and without a loss, in bytes.
        """
        used = in_own_losses(step) - step.brought
        if not _read(step, used):
            return cls.of_peak(step, 0)
        ample = cls.of_copies(step, COPIES, used)
        return ample if ample.peak <= AMPLE_SHARE * peak else cls.of_copies(step, FEWER, used)


NO_LOSS = LossMemory(0, 0)
LATE = ("gradient", "input gradient", "statistic")
"""The kinds of a step's outputs that its backward half gives."""


def _read(step: CapturedStep, used: frozenset[str]) -> list[torch.Tensor]:
    """The gradients of the outputs that a loss reads. What a forward sets as attributes (a normalised weight, say) is
    seldom for a loss."""
    others = used | step.attributes
    return [step.values[i.value].fake for i in step.inputs if i.kind == "tangent" and i.target not in others]


def _each(step: CapturedStep, used: frozenset[str] = frozenset()) -> int:
    """Bytes of the outputs that a loss reads, in float32 at least."""
    return sum(allocated(fake.numel() * max(fake.itemsize, 4), fake.device) for fake in _read(step, used))


def _scalar(step: CapturedStep) -> int:
    return allocated(8, step.device)


def with_loss_boundary(
    step: CapturedStep, graph: TrainingGraph, loss: LossMemory = NO_LOSS, copies: Copies = NONE
) -> TrainingGraph:
    """The problem of a step whose outputs and new buffers leave before its tangents come.

    ``loss``: what it holds at its peak is the workspace of an op of the backward, so that it divides no blocks, that
    runs once, after all that makes outputs or new buffers and before all that reads a tangent; what it keeps is a
    tensor of that op's.

    Whatever reads a tangent, or is marked as late, also reads all of them, so that they are there at the turn. The
    outputs are made once, and so stay from then on, as their owner holds them; no inverse brings them back. New buffers
    are copied at the turn, and what makes them (batch norm, say) may run again, from copies of what they were: these
    are charged as one more input. ``copies``, which the backward makes where a loss lays the tangents out otherwise,
    are charged to what makes them, or to what they are copies of; the loss's own tensor stands for the copies of
    tangents.
    """
    early = dict.fromkeys(step.values[o.value].storage for o in step.outputs if o.kind not in LATE)
    tangents = {step.values[i.value].storage for i in step.inputs if i.kind == "tangent"}
    given = sum(size for storage, size in copies.kept.items() if storage in tangents)
    late, marked = step.after_turn, {c.name for c in step.calls if c.late}
    workspace = max(0, loss.peak - loss.kept - given)
    between = Op(LOSS, tuple(early), (LOSS, LOSS_VALUE), 0.0, workspace, "backward")

    def turned(op: Op) -> Op:
        op = replace(op, workspace=op.workspace + copies.workspace.get(op.name, 0))
        return (
            op
            if tangents.isdisjoint(op.reads) and op.name not in marked
            else replace(op, reads=tuple(dict.fromkeys((*op.reads, *early, LOSS))))
        )

    held = dict.fromkeys(step.values[o.value].storage for o in step.outputs if o.kind == "output")
    made = [graph.ops[graph.producer[t]].name for t in held if t in graph.producer]
    old = sum(step.storage_bytes[s] for s in early if s not in held)
    beside = {OLD_BUFFERS: old} if old else {}
    kept = {storage: size for storage, size in copies.kept.items() if storage not in tangents}
    ops = (
        *(op for op in graph.ops if op.name not in late),
        between,
        *(turned(op) for op in graph.ops if op.name in late),
    )
    # What is done between the halves may communicate too.
    ordered = {*graph.ordered, *([LOSS] if any(c.collective for c in step.calls) else [])}
    return replace(
        graph,
        tensors=(
            *(replace(t, bytes=t.bytes + kept.get(t.name, 0)) for t in graph.tensors),
            Tensor(LOSS, given),
            Tensor(LOSS_VALUE, loss.kept),
            *(Tensor(name, size) for name, size in beside.items()),
        ),
        inputs=(*graph.inputs, *beside),
        outputs=(*graph.outputs, LOSS_VALUE, *([LOSS] if tangents & set(graph.outputs) else [])),
        fixed_split={**graph.fixed_split, **beside},
        ops=ops,
        ordered=tuple(op.name for op in ops if op.name in ordered),
        inverses=tuple(i for i in graph.inverses if not held.keys() & set(i.writes)),
        never_rerun=tuple(dict.fromkeys((*graph.never_rerun, *made, LOSS))),
    )


def without_room(graph: TrainingGraph) -> TrainingGraph:
    """The problem of a `with_loss_boundary` without what it leaves for a loss outside: what the step itself must
    hold."""
    free = {LOSS, LOSS_VALUE}
    return replace(
        graph,
        tensors=tuple(replace(t, bytes=0) if t.name in free else t for t in graph.tensors),
        ops=tuple(replace(op, workspace=0) if op.name == LOSS else op for op in graph.ops),
    )


def set_aside(graph: TrainingGraph) -> int:
    """Bytes that a step's `with_loss_boundary` leaves for a loss outside of it."""
    return graph.op[LOSS].workspace + sum(graph.size[t] for t in graph.op[LOSS].writes)


@dataclass(frozen=True, slots=True)
class SplitSchedule:
    """A schedule as it is run.

    ``schedule`` and ``lanes`` are without the loss and the optimizer's step, which others run, and without the last
    frees of gradients, which leave. ``positions``: where the steps of ``schedule`` stood. ``turn``: the position of the
    first after the loss. ``late``: that of the first which a split backward does later, after `WEIGHTS`; None if it is
    not split.
    """

    schedule: Schedule
    lanes: Lanes | None
    positions: tuple[int, ...]
    turn: int
    late: int | None = None


def split_at_loss(step: CapturedStep, schedule: Schedule, lanes: Lanes | None = None) -> SplitSchedule:
    """What is to be run of a schedule of a `with_loss_boundary`, and where it turns."""
    leaving = _leaving(step, schedule)
    outside = {*map(Run, OUTSIDE), Free(LOSS), Free(WEIGHTS)}
    own = tuple(at for at, one in enumerate(schedule) if one not in outside and at not in leaving)
    shorter, runs = lanes, runs_of(schedule)
    for name in reversed(OUTSIDE):  # the last run first: its going moves no other
        if shorter and name in runs:
            shorter = _without(shorter, runs.index(name))
    turn = bisect(own, schedule.index(Run(LOSS)))
    late = bisect(own, schedule.index(Run(WEIGHTS))) if WEIGHTS in runs else None
    return SplitSchedule(tuple(schedule[at] for at in own), shorter, own, turn, late)


def _leaving(step: CapturedStep, schedule: Schedule) -> set[int]:
    """Where a schedule frees gradients for good."""
    gradients = {step.values[o.value].storage for o in step.outputs if "gradient" in o.kind}
    found: set[int] = set()
    for at in reversed(range(len(schedule))):
        one = schedule[at]
        if isinstance(one, Free):
            found.update({at} if one.tensor in gradients else ())
        elif one.op in step.call:
            gradients.difference_update(step.reads(step.call[one.op]), step.writes(step.call[one.op]))
    return found


def _without(lanes: Lanes, run: int) -> Lanes:
    """The lanes without the main lane's run that stands at a position."""

    def at(other: int) -> int:
        return other - (other > run)

    return replace(
        lanes,
        fork=at(lanes.fork),
        recovery=tuple(map(at, lanes.recovery)),
        waits=tuple((at(one), at(other)) for one, other in lanes.waits if run not in (one, other)),
    )
