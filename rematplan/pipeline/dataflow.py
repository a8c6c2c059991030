"""The stages of a dataflow pipeline, which recover their inputs by inverses in the backward and return them
with the gradients.

So invertible stages keep nothing between forward and backward.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import partial

import torch
from torch import distributed
from torch.distributed import ProcessGroup

from rematplan.ir import TrainingGraph, UsageError
from rematplan.ir.training_graph import LIBRARIES
from rematplan.pipeline.captured_stages import captured_step
from rematplan.pipeline.torch_memory import LOSS_BYTES
from rematplan.planner.core.inversion_error import worst_error
from rematplan.planner.core.plan import Plan
from rematplan.planner.core.schedule import Run, Schedule
from rematplan.planner.pipeline.stage_plan import StagePlan
from rematplan.planner.pipeline.stage_problem import StageProblem
from rematplan.plans.planner import Planner
from rematplan.plans.stage_problems import reusable_bytes
from rematplan.runtime.execute.compile import tensors_in_step
from rematplan.runtime.execute.in_place import overwritable_operands, reused_bytes_of_all
from rematplan.runtime.graph.allocator_rounding import allocated
from rematplan.runtime.graph.captured_step import CapturedStep
from rematplan.runtime.pipeline.dataflow_code import check_crossing, compile_stage
from rematplan.runtime.pipeline.dataflow_stage import DataflowStage
from rematplan.runtime.pipeline.dataflow_step import Handed, dataflow_step, with_dataflow_boundary
from rematplan.runtime.pipeline.random_seeds import STATE
from rematplan.runtime.pipeline.stage_modules import StageModule
from rematplan.runtime.problem.earlier_gradients import adding_problem, earlier_gradients
from rematplan.runtime.problem.loss_boundary import LOSS
from rematplan.runtime.problem.loss_memory import LossMemory

STATES = ("parameter", "buffer", "constant", LIBRARIES)
"""The kinds of inputs that exist during the whole step."""
SMALL = 1e-6
"""The relative error of a tensor received in the backward for which the growth of errors is computed."""


@dataclass(frozen=True)
class DataflowPart:
    """A captured stage of a dataflow pipeline and its planning problem."""

    number: int
    """The stage's number, from 0."""
    stages: int
    """The number of stages of the pipeline."""
    stage: StageModule
    step: CapturedStep
    problem: StageProblem
    rounding: float
    """The relative error of an op that rounds otherwise than in the model; 0 if none does (`_rounding`)."""

    def compiled(self, plan: Plan, group: ProcessGroup) -> DataflowStage:
        """Compile the stage so that it follows ``plan``, and return it in the form that `DataflowSchedule` runs."""
        code = compile_stage(self.step, plan.schedule, self.number == self.stages - 1)
        error, gain = _errors(self.problem.graph, plan.schedule, self.step)
        kept = self.problem.measured(plan).held.kept
        if not kept:
            check_crossing(code)
        return DataflowStage(self.number, self.stages, self.stage, self.step, code, group, kept, error, gain)


def dataflow_part(
    stage: StageModule,
    planner: Planner,
    template: StagePlan,
    number: int,
    stages: int,
    loss: LossMemory | None = None,
) -> DataflowPart:
    """Capture a stage of a dataflow pipeline, where inverses recover activations in the backward, and make its planning
    problem. ``loss``: None for the memory that the options state or assume."""
    first, last = number == 0, number == stages - 1
    named = tensors_in_step(stage.module)
    captured = captured_step(stage)
    step = dataflow_step(captured, named, first=first, last=last)
    graph = planner.priced(step)
    loss_bytes = 0
    if last:
        tangents = (step.values[i.value].fake for i in step.inputs if i.kind == "tangent")
        loss = loss or planner.loss(step, graph)
        loss_bytes = loss.peak + max(loss.forward, sum(allocated(t.nbytes, t.device) for t in tangents))
        template = template.adding(torch_bytes=allocated(LOSS_BYTES, step.device))  # during the backward
    if any(call.seeded for call in step.calls):
        template = template.adding(torch_bytes=STATE)
    graph = planner.running_once(step, with_dataflow_boundary(step, graph, last=last, loss_bytes=loss_bytes))
    added, _ = earlier_gradients(step)
    adding = adding_problem(step, graph, added)
    kinds = {step.values[i.value].storage: i.kind for i in reversed(step.inputs)}
    operands = overwritable_operands(step)
    problem = StageProblem(
        adding,
        LOSS,
        states=tuple(t for t in adding.inputs if kinds.get(t, t) in STATES),
        gradients={new: old for old, new in zip(graph.outputs, adding.outputs, strict=True) if old != new},
        untaken=partial(_untaken_bytes, step),
        reused=partial(reused_bytes_of_all, step, operands),
        reusable=reusable_bytes(step, operands, backward=True),
        template=template,
    )
    return DataflowPart(number, stages, stage, step, problem, _rounding(captured, step))


def dataflow_stages(
    part: DataflowPart, plan: Plan, group: ProcessGroup | None, wrapped: bool
) -> list[DataflowStage]:
    """Return a list with one item: the stage of a dataflow pipeline that this process runs, ready for
    `DataflowSchedule`. `UsageError` for wrapped stages, another backend than gloo, and other devices than CPUs."""
    if wrapped:
        raise UsageError(
            "stages of a dataflow run without autograd and cannot be wrapped; use schedule gpipe or 1f1b"
        )
    own = group if group is not None else distributed.group.WORLD
    assert own is not None
    if distributed.get_backend(own) != "gloo":
        backend = distributed.get_backend(own)
        raise UsageError(f"a dataflow sends its messages over gloo, but this process group uses {backend}")
    device = part.stage.device
    if device.type != "cpu":
        raise UsageError(f"a dataflow runs on CPUs, but stage {part.number} is on {device}")
    return [part.compiled(plan, own)]


def _untaken_bytes(step: CapturedStep, schedule: Schedule) -> list[int]:
    """Return, by position of a schedule, the bytes of tensors that have arrived but are taken later."""
    # A message arrives whole before a forward's or backward's first op.
    boundary = schedule.index(Run(LOSS))
    found = [0] * len(schedule)
    for at, one in enumerate(schedule):
        if isinstance(one, Run) and one.op in step.call and isinstance(step.call[one.op].target, Handed):
            taken = sum(step.storage_bytes[t] for t in step.writes(step.call[one.op]))
            for earlier in range(boundary + 1 if at > boundary else 0, at):
                found[earlier] += taken
    return found


def _rounding(captured: CapturedStep, step: CapturedStep) -> float:
    """Return half the type's epsilon if a floating-point tensor has other strides than in the model, else 0."""
    # Ops may then sum in another order. A reversible network's halves are slices in the model, and separate
    # tensors in the stage.
    pairs = (
        (captured.values[name].fake, step.values[name].fake) for name in captured.values.keys() & step.values
    )
    moved = (own.dtype for own, new in pairs if own.stride() != new.stride() and own.is_floating_point())
    return max((torch.finfo(dtype).eps / 2 for dtype in moved), default=0.0)


def _errors(graph: TrainingGraph, schedule: Schedule, step: CapturedStep) -> tuple[float, float]:
    """Return the largest predicted relative error of the tensors that a schedule recovers, and by how much it grows for
    each unit of relative error in the tensors received."""
    exact = worst_error(graph, schedule)
    answers = {inverse.name for inverse in step.inverses if isinstance(inverse.target, Handed)}
    noisy = replace(
        graph, inverses=tuple(replace(i, noise=SMALL) if i.name in answers else i for i in graph.inverses)
    )
    return exact, max(0.0, worst_error(noisy, schedule) - exact) / SMALL
