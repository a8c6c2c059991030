"""The planning problem of a pipeline stage: a captured step of one micro-batch, while several are in flight."""

from __future__ import annotations

from collections.abc import Collection

from rematplan.ir import TrainingGraph
from rematplan.ir.training_graph import LIBRARIES
from rematplan.planner.core.schedule import Run, Schedule
from rematplan.planner.core.simulator import resident_bytes
from rematplan.planner.pipeline.actions import StagePlan
from rematplan.planner.pipeline.stage_problem import StageProblem
from rematplan.runtime.execute.buffers_once import renewed_buffers
from rematplan.runtime.graph.captured_step import CapturedStep
from rematplan.runtime.problem.accumulation import adding_problem, earlier_gradients, waiting_bytes
from rematplan.runtime.problem.loss_boundary import LOSS, WEIGHTS
from rematplan.runtime.problem.planning_problem import RNG_STATES


def stage_problem(
    step: CapturedStep,
    graph: TrainingGraph,
    *,
    per_microbatch: Collection[str] = (),
    tangents: Collection[str] = (),
    between: int = 0,
    template: StagePlan,
) -> StageProblem:
    """Return the planning problem of a pipeline stage's step that runs while gradients of other micro-batches exist.

    Args:
        step: the captured step of one micro-batch.
        graph: its problem with an op that separates forward from backward, and with the op `WEIGHTS` if weight
            gradients are computed separately.
        per_microbatch: the kinds of inputs that each micro-batch holds from its forward to its backward, such as
            ``batch``.
        tangents: the kinds of inputs that each micro-batch holds only in its backward. Kinds in neither list, except
            parameters, buffers and constants, are counted elsewhere.
        between: bytes outside of the graph that are held for a micro-batch from its forward to its backward, such as
            those of a loss.
        template: the memory of the stage that does not depend on the plan.
    """
    added, _ = earlier_gradients(step)
    adding = adding_problem(step, graph, added)
    kinds = {step.values[i.value].storage: i.kind for i in reversed(step.inputs)}

    def of(*wanted: str) -> tuple[str, ...]:
        return tuple(t for t in adding.inputs if kinds.get(t, t) in wanted)

    return StageProblem(
        adding,
        LOSS,
        states=of("parameter", "buffer", "constant", LIBRARIES),
        per_microbatch=of(*per_microbatch),
        tangents=of(*tangents),
        between=between,
        weights=WEIGHTS if WEIGHTS in graph.op else None,
        copies=_copies(step, adding),
        leaving=_leaving(step, adding),
        gradients={new: old for old, new in zip(graph.outputs, adding.outputs, strict=True) if old != new},
        waiting=lambda schedule: waiting_bytes(step, schedule, backward_spare(adding, schedule), added),
        template=template,
    )


def backward_spare(graph: TrainingGraph, schedule: Schedule) -> tuple[int, ...]:
    """Return, for each step of a schedule, the backward's peak minus the resident bytes at that step, but at least 0.

    New gradients that wait to be added to earlier ones may use these bytes without raising the peak.
    """
    resident = resident_bytes(graph, schedule)
    peak = max(resident[schedule.index(Run(LOSS)) :])
    return tuple(max(0, peak - now) for now in resident)


def _leaving(step: CapturedStep, graph: TrainingGraph) -> tuple[str, ...]:
    """Return the new buffers that no op of the backward reads."""
    made = dict.fromkeys(step.values[o.value].storage for o in step.outputs if o.kind == "buffer")
    read = {t for op in graph.ops if op.name in step.after_loss for t in op.reads}
    return tuple(t for t in made if t in graph.producer and t not in read)


def _copies(step: CapturedStep, graph: TrainingGraph) -> dict[str, int]:
    """Return, for each op, the bytes of copies that are kept for running it again in the backward.

    These are old contents of buffers that the step renews, and states of the random generator.
    """
    renewed = renewed_buffers(step)
    seeded = [call.name for call in step.calls if call.seeded and call.name not in graph.never_rerun]
    state = graph.size.get(RNG_STATES, 0) // (len(seeded) + 1)
    found = dict.fromkeys(seeded, state)
    for op in graph.ops:
        if old := renewed.intersection(op.reads):
            found[op.name] = found.get(op.name, 0) + sum(graph.size[t] for t in old)
    return found
