"""The turn of a step from forward to backward, where its outputs leave for a loss and their gradients come back."""

from __future__ import annotations

from bisect import bisect
from dataclasses import dataclass, replace

from rematplan.ir import Op, Tensor, TrainingGraph
from rematplan.planner.lanes import Lanes
from rematplan.planner.schedule import Free, Run, Schedule, runs_of
from rematplan.runtime.captured_step import CapturedStep
from rematplan.runtime.measure import allocated
from rematplan.runtime.other_layouts import NONE, Copies

OLD_BUFFERS = "old_buffers"
"""The tensor that stands for the copies of buffers as they were before the step."""
LOSS = "(loss)"
"""The op that stands for what is done with the outputs until their gradients come, and its tensor, which stands for
copies of these."""
COPIES = 5
"""Tensors of the outputs' size, in float32 at least, that almost every loss does with at its peak, the gradients of the
outputs among them: the mean of squares, l1, dice and divergences hold four, a squared difference written out five."""
FEWER = 4
"""As many where the outputs are large. Cross entropy and a mean squared error hold three."""
SMALL = 1 / 8
"""Share of a step's peak up to which `COPIES` are set aside."""
LOSS_VALUES = "loss_values"
"""The tensor that stands for a loss and the gradient of that, which whoever calls the backward holds till its end."""
SCALARS = 8
"""Tensors of one number that a loss has besides: a sum of weights, a temperature, a penalty."""


def loss_memory(step: CapturedStep, copies: float, used: frozenset[str] = frozenset()) -> int:
    """Bytes that a loss of so many tensors of the outputs' size holds beside the outputs and their gradients.

    ``used``: the positions of outputs that it does not read.
    """
    tangents = (i for i in step.inputs if i.kind == "tangent" and i.target not in used)
    fakes = [step.values[i.value].fake for i in tangents]
    scalars = SCALARS * allocated(8, step.device)
    given = sum(allocated(fake.nbytes, fake.device) for fake in fakes)
    each = sum(allocated(fake.numel() * max(fake.itemsize, 4), fake.device) for fake in fakes)
    return max(0, int(copies * each) - given) + scalars


def usual_loss_memory(step: CapturedStep, peak: int) -> int:
    """Bytes that a usual loss holds beside the outputs and their gradients.

    A scalar among the outputs is taken for a loss of the model's own, and what it is made of for used by that: there
    are none for these. An auxiliary loss that is made of something else leaves the other outputs theirs.

    ``peak``: the step's without recomputation and without a loss, in bytes.
    """
    used = _in_own_losses(step)
    if all(i.target in used for i in step.inputs if i.kind == "tangent"):
        return 0
    ample = loss_memory(step, COPIES, used)
    return ample if ample <= SMALL * peak else loss_memory(step, FEWER, used)


def _in_own_losses(step: CapturedStep) -> frozenset[str]:
    """The positions of the outputs that are scalars with gradients, or that such scalars are made of."""
    tangents = {i.target: i.value for i in step.inputs if i.kind == "tangent"}
    outputs = {o.target: o.value for o in step.outputs if o.kind == "output" and o.target in tangents}
    storage = {target: step.values[value].storage for target, value in outputs.items()}
    within = {storage[t] for t, value in outputs.items() if step.values[value].fake.numel() <= 1}
    for call in reversed(step.calls):
        if not within.isdisjoint(step.writes(call)):
            within.update(step.reads(call))
    return frozenset(target for target, its in storage.items() if its in within)


def turning_problem(
    step: CapturedStep, graph: TrainingGraph, loss: int = 0, copies: Copies = NONE
) -> TrainingGraph:
    """The problem of a step whose outputs and new buffers leave before its tangents come.

    ``loss``: bytes that the loss holds beside the outputs and the tangents, at its peak. It is the workspace of
    an op of the backward, so that it divides no blocks, that runs once, after all that makes outputs or new buffers
    and before all that reads a tangent.

    Whatever reads a tangent also reads all of them, so that they are there at the turn. The outputs are made once, and
    so stay from then on, as their owner holds them; no inverse brings them back. New buffers are copied at the turn,
    and what makes them (batch norm, say) may run again, from copies of what they were: these are charged as one more
    input, and so are the loss and its gradient. ``copies``, which the backward makes where a loss lays the tangents out
    otherwise, are charged to what makes them, or to what they are copies of; the loss's own tensor stands for the
    copies of tangents.
    """
    early = dict.fromkeys(step.values[o.value].storage for o in step.outputs if "gradient" not in o.kind)
    tangents = {step.values[i.value].storage for i in step.inputs if i.kind == "tangent"}
    given = sum(size for storage, size in copies.kept.items() if storage in tangents)
    late = step.after_turn
    between = Op(LOSS, tuple(early), (LOSS,), 0.0, max(0, loss - given), "backward")

    def turned(op: Op) -> Op:
        op = replace(op, workspace=op.workspace + copies.workspace.get(op.name, 0))
        return (
            op
            if tangents.isdisjoint(op.reads)
            else replace(op, reads=tuple(dict.fromkeys((*op.reads, *early, LOSS))))
        )

    held = dict.fromkeys(step.values[o.value].storage for o in step.outputs if o.kind == "output")
    made = [graph.ops[graph.producer[t]].name for t in held if t in graph.producer]
    old = sum(step.storage_bytes[s] for s in early if s not in held)
    values = 2 * allocated(8, step.device) if tangents else 0
    beside = {name: size for name, size in ((OLD_BUFFERS, old), (LOSS_VALUES, values)) if size}
    kept = {storage: size for storage, size in copies.kept.items() if storage not in tangents}
    charged = replace(
        graph,
        tensors=(
            *(replace(t, bytes=t.bytes + kept.get(t.name, 0)) for t in graph.tensors),
            Tensor(LOSS, given),
            *(Tensor(name, size) for name, size in beside.items()),
        ),
        inputs=(*graph.inputs, *beside),
        outputs=(*graph.outputs, *([LOSS] if tangents & set(graph.outputs) else [])),
        fixed_split={**graph.fixed_split, **beside},
    )
    return replace(
        charged,
        ops=(
            *(op for op in graph.ops if op.name not in late),
            between,
            *(turned(op) for op in graph.ops if op.name in late),
        ),
        inverses=tuple(i for i in graph.inverses if not held.keys() & set(i.writes)),
        never_rerun=tuple(dict.fromkeys((*graph.never_rerun, *made, LOSS))),
    )


def set_aside(graph: TrainingGraph) -> int:
    """Bytes that a step's `turning_problem` leaves for a loss outside of it."""
    return graph.op[LOSS].workspace + graph.size[LOSS]


@dataclass(frozen=True, slots=True)
class Turned:
    """A schedule as it is run.

    ``schedule`` and ``lanes`` are without the loss, which others run, and without the last frees of gradients, which
    leave. ``positions``: where the steps of ``schedule`` stood. ``turn``: the position of the first after the loss.
    """

    schedule: Schedule
    lanes: Lanes | None
    positions: tuple[int, ...]
    turn: int


def turned(step: CapturedStep, schedule: Schedule, lanes: Lanes | None = None) -> Turned:
    """What is to be run of a schedule of a `turning_problem`, and where it turns."""
    leaving = _leaving(step, schedule)
    own = tuple(
        at for at, one in enumerate(schedule) if one not in (Run(LOSS), Free(LOSS)) and at not in leaving
    )
    shorter = lanes and _without(lanes, runs_of(schedule).index(LOSS))
    return Turned(tuple(schedule[at] for at in own), shorter, own, bisect(own, schedule.index(Run(LOSS))))


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
