"""The loss boundary: the moment between forward and backward at which the caller has the outputs and computes
their gradients."""

from __future__ import annotations

from bisect import bisect
from collections.abc import Collection, Set
from dataclasses import dataclass, replace

from rematplan.ir import Op, Tensor, TrainingGraph
from rematplan.planner.core.lane_schedule import Lanes
from rematplan.planner.core.schedule import Free, Run, Schedule, Step, runs_of
from rematplan.runtime.graph.captured_step import CapturedStep
from rematplan.runtime.problem.layout_copies import NONE, Copies
from rematplan.runtime.problem.loss_memory import NO_LOSS, LossMemory
from rematplan.runtime.problem.random_states import saves_state
from rematplan.runtime.problem.sum_states import is_content

OLD_BUFFERS = "old_buffers"
"""The tensor that represents copies of buffers from before the step."""
LOSS = "(loss)"
"""The op that represents all computation between the outputs and their gradients; also the name of its
tensor, which represents copies of these gradients."""
LOSS_VALUE = "(loss value)"
"""A tensor that the op `LOSS` writes. It represents the bytes of the loss that stay allocated until the step ends."""
OPTIMIZER = "(optimizer)"
"""The op that represents the optimizer's step, in problems that contain it; also the name of its zero-byte tensor."""
WEIGHTS = "(weight gradients)"
"""The op that represents the time between the two parts of a split backward (input gradients, weight
gradients); also the name of its tensor."""
OUTSIDE = (LOSS, OPTIMIZER, WEIGHTS)
"""Ops that the caller runs, not the plan."""
LATE = ("gradient", "input gradient", "statistic")
"""The kinds of outputs that the backward half computes."""


def with_loss_boundary(
    step: CapturedStep, graph: TrainingGraph, loss: LossMemory = NO_LOSS, copies: Copies = NONE
) -> TrainingGraph:
    """Return a step's problem with a loss boundary: the op `LOSS` between the halves, at which the caller has outputs
    and new buffers and computes a loss. Ops that read an output's gradient, or are `Call.late`, run after it. ``loss``
    and ``copies`` add their bytes; old buffers that are copied become an input."""
    early = dict.fromkeys(step.values[o.value].storage for o in step.outputs if o.kind not in LATE)
    tangents = step.given("tangent")
    tangent_copies = sum(size for storage, size in copies.kept.items() if storage in tangents)
    late, marked = step.after_loss, {c.name for c in step.calls if c.late}
    backward = late | _needed_later(graph, early)
    # An op of the backward half, so that it does not divide forward blocks. Its tensors are the bytes that
    # stay after the loss, its workspace is the rest of the loss's peak.
    workspace = max(0, loss.peak - loss.kept - tangent_copies)
    between = Op(LOSS, tuple(early), (LOSS, LOSS_VALUE), 0.0, workspace, "backward")

    # It also reads outputs and new buffers, so that these exist at the boundary.
    def after_loss(op: Op) -> Op:
        op = replace(op, workspace=op.workspace + copies.workspace.get(op.name, 0))
        if tangents.isdisjoint(op.reads) and op.name not in marked:
            return op
        return replace(op, reads=tuple(dict.fromkeys((*op.reads, *early, LOSS))))

    outputs = step.returned("output")
    # The caller keeps outputs, so they are computed once and no inverse recomputes them. It has copied new buffers
    # when the loss begins.
    made = [graph.ops[graph.producer[t]].name for t in outputs if t in graph.producer]
    renewing = _renewing(step, graph)
    old_buffers, once = _old_buffers(step, graph, late, renewing)
    # Those that an op makes with other results, as batch norm does, are small and may be made again.
    copied = {t for name in renewing for t in graph.op[name].writes}
    kept = {storage: size for storage, size in copies.kept.items() if storage not in tangents}
    ops = (
        *(op for op in graph.ops if op.name not in backward),
        between,
        *(after_loss(op) if op.name in late else op for op in graph.ops if op.name in backward),
    )
    # The caller may communicate between the halves, too.
    ordered = {*graph.ordered, *([LOSS] if any(c.collective for c in step.calls) else [])}
    return replace(
        graph,
        tensors=(
            *(replace(t, bytes=t.bytes + kept.get(t.name, 0)) for t in graph.tensors),
            Tensor(LOSS, tangent_copies),
            Tensor(LOSS_VALUE, loss.kept),
            *(Tensor(name, size) for name, size in old_buffers.items()),
        ),
        inputs=(*graph.inputs, *old_buffers),
        outputs=(
            *(t for t in graph.outputs if t not in copied),
            LOSS_VALUE,
            *([LOSS] if tangents & set(graph.outputs) else []),
        ),
        fixed_split={**graph.fixed_split, **old_buffers},
        ops=ops,
        ordered=tuple(op.name for op in ops if op.name in ordered),
        inverses=tuple(i for i in graph.inverses if outputs.isdisjoint(i.writes)),
        never_rerun=graph.once(*made, *renewing, *once, LOSS),
    )


def _renewing(step: CapturedStep, graph: TrainingGraph) -> dict[str, None]:
    """Return, last first, the ops of which each result is a new buffer, or is no output and is read by such ops alone,
    at least one."""
    new, found = step.returned("buffer"), dict[str, None]()
    kept = set(graph.outputs) - new
    for op in reversed(graph.ops):
        read = {name for t in op.writes if t not in new for name in graph.readers.get(t, [""])}
        if read <= found.keys() and kept.isdisjoint(op.writes):
            found[op.name] = None
    return found


def _old_buffers(
    step: CapturedStep, graph: TrainingGraph, late: Set[str], renewing: Collection[str]
) -> tuple[dict[str, int], list[str]]:
    """Return the bytes of all copied old buffers (under `OLD_BUFFERS`; empty if none), and ops that run once. A buffer
    is copied if its readers outside of ``renewing`` make more bytes than it has or one is ``late``, or if the whole
    forward may run again. Else its readers run once."""
    once, copied = list[str](), 0
    for t in step.renewed:
        readers = graph.readers.get(t, ())
        again = [name for name in readers if name not in renewing]
        made = sum(graph.size[r] for name in again for r in graph.op[name].writes)
        # A forward that may run again as a whole has copies of all.
        if step.left_out or made > graph.size[t] or not late.isdisjoint(again):
            copied += graph.size[t]
        else:
            once += readers
    return ({OLD_BUFFERS: copied} if copied else {}), once


def _needed_later(graph: TrainingGraph, early: Collection[str]) -> set[str]:
    """Return the backward ops that no tensor in ``early`` depends on, although some could run before the loss."""
    needed = set(early)
    for op in reversed(graph.ops):
        if not needed.isdisjoint(op.writes):
            needed.update(op.reads)
    return {op.name for op in graph.ops if op.phase == "backward" and needed.isdisjoint(op.writes)}


def without_loss_bytes(graph: TrainingGraph) -> TrainingGraph:
    """Return a problem with a loss boundary in which the loss takes 0 bytes: its peaks are those of the step alone."""
    free = {LOSS, LOSS_VALUE}
    return replace(
        graph,
        tensors=tuple(replace(t, bytes=0) if t.name in free else t for t in graph.tensors),
        ops=tuple(replace(op, workspace=0) if op.name == LOSS else op for op in graph.ops),
    )


def reserved_for_loss(graph: TrainingGraph) -> int:
    """Return the bytes that a planning problem reserves for the loss: its workspace and the tensors that it writes.
    ``graph``: a problem made by `with_loss_boundary`."""
    return graph.op[LOSS].workspace + sum(graph.size[t] for t in graph.op[LOSS].writes)


@dataclass(frozen=True, slots=True)
class SplitSchedule:
    """The part of a schedule that a compiled plan runs, split at the loss boundary."""

    schedule: Schedule
    """The schedule without the ops in `OUTSIDE`, which the caller runs, and those that represent saved states and
    memory. The last free of each gradient, which the caller takes, is left out, too."""
    lanes: Lanes | None
    """The placement of the op executions in ``schedule`` on two lanes; None for one lane."""
    positions: tuple[int, ...]
    """The position of each entry of ``schedule`` in the original schedule."""
    boundary: int
    """The index in ``schedule`` of the first entry after the loss."""
    late: int | None = None
    """The index of the second part of a split backward, after the frees at the end of the first; None if it is not
    split."""


def split_at_loss(step: CapturedStep, schedule: Schedule, lanes: Lanes | None = None) -> SplitSchedule:
    """Return the part of a schedule that a compiled plan runs, split at its run of `LOSS`, which it must contain.
    ``lanes``: the whole schedule's; None for one lane."""
    leaving = _leaving(step, schedule)
    own = tuple(at for at, one in enumerate(schedule) if at not in leaving and not _is_callers(one))
    shorter, runs = lanes, runs_of(schedule)
    for at in reversed([k for k, name in enumerate(runs) if _is_callers(Run(name))]):
        if shorter:  # the last run first, so that the positions of the others stay valid
            shorter = _without(shorter, at)
    boundary = bisect(own, schedule.index(Run(LOSS)))
    late = bisect(own, schedule.index(Run(WEIGHTS))) if WEIGHTS in runs else None
    # The first part of a split backward also frees what its last op was the last to read.
    while late is not None and late < len(own) and isinstance(schedule[own[late]], Free):
        late += 1
    return SplitSchedule(tuple(schedule[at] for at in own), shorter, own, boundary, late)


def _is_callers(one: Step) -> bool:
    """Return whether an entry is of an op that the caller runs, or of one that represents the content of memory or a
    generator's state (which is saved at the first draw)."""
    name = one.op if isinstance(one, Run) else one.tensor
    return name in (*OUTSIDE, LOSS_VALUE) or saves_state(name) or is_content(name)


def _leaving(step: CapturedStep, schedule: Schedule) -> set[int]:
    """Return the positions at which a schedule frees a gradient that no later op reads or writes."""
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
    """Return a placement on two lanes without the op execution number ``run``, which must be on the main lane."""

    def at(other: int) -> int:
        return other - (other > run)

    return replace(
        lanes,
        fork=at(lanes.fork),
        recovery=tuple(map(at, lanes.recovery)),
        waits=tuple((at(one), at(other)) for one, other in lanes.waits if run not in (one, other)),
    )


def with_optimizer_step(step: CapturedStep, graph: TrainingGraph, transient: int) -> TrainingGraph:
    """Return a problem with the optimizer's step as last op; the same problem if ``transient``, that step's temporary
    bytes, is 0. Its workspace is less by the outputs' gradients, which are counted as inputs but freed before."""
    if not transient:
        return graph
    tangents = step.given("tangent")
    # The problem counts the outputs' gradients as inputs, but they are freed before the optimizer runs.
    gone = sum(graph.size[t] for t in tangents - set(graph.outputs))
    stepped = Op(OPTIMIZER, graph.outputs, (OPTIMIZER,), 0.0, max(0, transient - gone), "backward")
    return replace(
        graph,
        tensors=(*graph.tensors, Tensor(OPTIMIZER, 0)),
        outputs=(*graph.outputs, OPTIMIZER),
        ops=(*graph.ops, stepped),
        never_rerun=graph.once(OPTIMIZER),
    )
