"""Make the planning problem of a stage from its step of one micro-batch, while others are in flight."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import replace

from rematplan.ir import Op, TrainingGraph
from rematplan.ir.training_graph import LIBRARIES
from rematplan.planner.core.schedule import Run, Schedule
from rematplan.planner.pipeline.stage_plan import StagePlan
from rematplan.planner.pipeline.stage_problem import StageProblem
from rematplan.plans.step_problems import RESERVED
from rematplan.runtime.execute.in_place import Operands, overwritable_operands, reused_bytes
from rematplan.runtime.graph.allocator_rounding import allocated
from rematplan.runtime.graph.captured_step import CapturedStep
from rematplan.runtime.problem.earlier_gradients import adding_problem, earlier_gradients, waiting_bytes
from rematplan.runtime.problem.loss_boundary import LOSS, WEIGHTS

NUMBER = 16
"""The most bytes in which an op on a CPU holds a number among its arguments while it runs: 8 for the number as Python
has it, and up to 8 for the number in the result's type."""


def stage_problem(
    step: CapturedStep,
    graph: TrainingGraph,
    *,
    per_microbatch: Collection[str] = (),
    tangents: Collection[str] = (),
    between: int = 0,
    loss_forward: int = 0,
    as_captured: bool = False,
    own_weights: bool = False,
    template: StagePlan,
) -> StageProblem:
    """Make the problem of a pipeline stage for one micro-batch of several in flight, whose backward adds to earlier
    gradients, or leaves its own with ``own_weights``. ``per_microbatch``, ``tangents``: kinds of inputs. ``between``,
    ``loss_forward``: bytes of a loss from forward to backward, and in its own forward. ``as_captured``: whether the
    backward may overwrite operands, too."""
    added, bytes_ = earlier_gradients(step)
    if own_weights:
        added, template = frozenset(), template.adding(left=bytes_)
    adding = _with_numbers(step, adding_problem(step, graph, added))
    kinds = {step.values[i.value].storage: i.kind for i in reversed(step.inputs)}

    def of(*wanted: str) -> tuple[str, ...]:
        return tuple(t for t in adding.inputs if kinds.get(t, t) in wanted)

    operands = overwritable_operands(step)
    problem = StageProblem(
        adding,
        LOSS,
        states=of("parameter", "buffer", "constant", LIBRARIES, RESERVED),
        per_microbatch=of(*per_microbatch),
        tangents=of(*tangents),
        between=between,
        loss_forward=loss_forward,
        weights=WEIGHTS if WEIGHTS in graph.op else None,
        copies=_copies(step, adding),
        leaving=_leaving(step, adding),
        gradients={new: old for old, new in zip(graph.outputs, adding.outputs, strict=True) if old != new},
        reused=lambda schedule: reused_bytes(step, operands, schedule, backward=as_captured),
        reusable=reusable_bytes(step, operands, backward=as_captured),
        template=template,
    )
    return replace(
        problem,
        waiting=lambda schedule: waiting_bytes(step, schedule, backward_spare(problem, schedule), added),
    )


def _with_numbers(step: CapturedStep, graph: TrainingGraph) -> TrainingGraph:
    """Return a problem whose ops on a CPU have at least the workspace of numbers among their arguments, which
    modelled costs lack."""
    if step.device.type != "cpu":
        return graph

    def counted(op: Op) -> Op:
        args = step.call[op.name].args if op.name in step.call else ()
        numbers = sum(isinstance(arg, (int, float)) for arg in args)
        return replace(op, workspace=max(op.workspace, NUMBER * numbers))

    return replace(graph, ops=tuple(map(counted, graph.ops)), inverses=tuple(map(counted, graph.inverses)))


def reusable_bytes(step: CapturedStep, operands: Operands, backward: bool) -> dict[str, int]:
    """Return, by op that may overwrite an operand, the bytes of the largest such operand. ``backward``: include the
    backward's."""
    return {
        name: max(step.storage_bytes[value.storage] for value in values)
        for name, values in operands.items()
        if backward or name not in step.after_loss
    }


def backward_spare(problem: StageProblem, schedule: Schedule) -> tuple[int, ...]:
    """Return, by position, how many bytes a schedule is below the backward's peak, at least 0. Waiting gradients may
    use them."""
    resident = problem.resident(schedule)
    peak = max(resident[schedule.index(Run(LOSS)) :])
    return tuple(max(0, peak - now) for now in resident)


def whole_outputs(step: CapturedStep, graph: TrainingGraph) -> tuple[str, ...]:
    """Return the tensors of a step's problem that its forward computes and that are no larger than the one output that
    they contain."""
    outputs: dict[str, list[int]] = {}
    for o in step.outputs:
        if o.kind == "output":
            value = step.values[o.value]
            outputs.setdefault(value.storage, []).append(allocated(value.fake.nbytes, value.fake.device))
    return tuple(t for t, sizes in outputs.items() if t in graph.producer and sizes == [graph.size[t]])


def readers(step: CapturedStep, graph: TrainingGraph, tensors: Collection[str]) -> dict[str, frozenset[str]]:
    """Return, by tensor, the ops and inverses that read it, without those that read it only so that it exists then."""
    found: dict[str, set[str]] = {t: set() for t in tensors}
    for op in (*graph.ops, *graph.inverses):
        for t in found.keys() & {*step.reads(step.call[op.name])} if op.name in step.call else ():
            found[t].add(op.name)
    return {t: frozenset(names) for t, names in found.items()}


def _leaving(step: CapturedStep, graph: TrainingGraph) -> tuple[str, ...]:
    """Return the tensors with new contents of buffers that a step computes and that no op of the step reads."""
    made = step.returned("buffer")
    every = (*graph.ops, *graph.inverses)  # some read a buffer in the problem only so that it exists then
    read = {t for op in every if op.name in step.call for t in step.reads(step.call[op.name])}
    return tuple(t for t in made if t in graph.producer and t not in read)


def _copies(step: CapturedStep, graph: TrainingGraph) -> dict[str, int]:
    """Return, by op that the backward may run again, the bytes of old contents of overwritten buffers that it needs."""
    renewed = step.renewed
    old = {op.name: renewed & set(op.reads) for op in graph.ops}
    return {name: sum(graph.size[t] for t in read) for name, read in old.items() if read}
