"""Capture pipeline stages, make their planning problems, and return modules that run the stages as plans say."""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch
from torch import nn

from rematplan.module.captures import ReadyCapture, capture_call
from rematplan.module.given_plan import module_with_plan, ops_of
from rematplan.module.plan_access import Planning
from rematplan.planner.core.plan import Plan
from rematplan.planner.core.schedule import Schedule
from rematplan.planner.pipeline.stage_plan import StagePlan
from rematplan.planner.pipeline.stage_problem import StageProblem
from rematplan.plans.planner import Planner
from rematplan.plans.refining import StepPlan
from rematplan.plans.stage_problems import backward_spare, readers, stage_problem, whole_outputs
from rematplan.runtime.capture.output_storages import with_own_outputs
from rematplan.runtime.graph.captured_step import CapturedStep
from rematplan.runtime.graph.compat import pytree
from rematplan.runtime.pipeline.stage_modules import StageModule
from rematplan.runtime.problem.earlier_gradients import end_of_first_segment
from rematplan.runtime.problem.loss_memory import NO_LOSS, LossMemory
from rematplan.runtime.problem.weight_gradients import with_separate_weights, with_weight_boundary


@dataclass(frozen=True)
class StagePlace:
    """The position of a stage in its pipeline, and facts about its neighbours."""

    first: bool
    """Whether it is the first, whose inputs the caller keeps. Other stages have separate inputs for each
    micro-batch."""
    last: bool
    """Whether the loss is computed from its outputs."""
    split: bool
    """Whether the schedule computes weight gradients later."""
    copied: int
    """Bytes of output copies that a module around the stage keeps per micro-batch from forward to backward."""
    handed: int
    """Bytes of the outputs if the next stage is on the same rank and counts them; else 0."""
    freed: bool
    """Whether torch frees sent outputs before their backward."""
    alone: bool
    """Whether no module is around the stage that could hold its outputs and their gradients."""


@dataclass(frozen=True)
class CapturedStage:
    """A captured pipeline stage with its planning problem."""

    stage: StageModule
    """The module and its arguments."""
    planner: Planner
    """The planner that makes the planning problem."""
    template: StagePlan
    place: StagePlace
    loss: LossMemory | None
    """The memory of the loss of one micro-batch; None if it was not measured."""
    capture: ReadyCapture
    original: CapturedStep
    """The forward and backward of one micro-batch as captured, with outputs in storages of their own."""
    step: CapturedStep
    """``original`` with splits, fused kernels and inverses, as the options say."""
    problem: StageProblem
    calls: tuple[object, ...]
    """The ATen ops of the capture, with the types of their results, to check a later capture."""

    def planned(self, plan: Plan, prepared: bool = True) -> nn.Module:
        """Return a module that runs the stage as ``plan`` says, with the stage's parameters and buffers. It is compiled
        now if ``prepared``, else in its first forward."""
        spare = backward_spare(self.problem, plan.schedule)
        made = StepPlan(self.step, plan, spare, self.problem.gradient_bytes)
        capture = self.capture if prepared else None
        module = module_with_plan(self.stage.module, self.planner.options, made, self.calls, capture)
        if not prepared:
            return module
        args, kwargs = stage_arguments(self.stage)
        return Planning(module).prepare(*args, **kwargs)  # type: ignore[no-any-return]

    def rewritten(self, step: CapturedStep) -> CapturedStage:
        """Return the stage with another form of its step, such as with splits."""
        step, problem = _problem(self.planner, step, self.template, self.place, self.loss)
        return replace(self, step=step, problem=problem)


def captured_stage(
    stage: StageModule, planner: Planner, template: StagePlan, place: StagePlace, loss: LossMemory | None
) -> CapturedStage:
    """Capture a pipeline stage, and return it with its planning problem, without splits."""
    capture, captured = capture_call(stage.module, *stage_arguments(stage))
    original = with_own_outputs(captured, leaves=True)
    step, problem = _problem(planner, original, template, place, loss)
    return CapturedStage(
        stage, planner, template, place, loss, capture, original, step, problem, ops_of(captured)
    )


def _problem(
    planner: Planner, step: CapturedStep, template: StagePlan, place: StagePlace, loss: LossMemory | None
) -> tuple[CapturedStep, StageProblem]:
    """Add inverses to a stage's step, and separate weight gradients if the place says so. Return the new step and its
    planning problem, which also has what the place says about its messages. ``loss``: of the last stage, ignored in
    others; None for the memory that the options state or assume."""
    step = planner.with_inverses(step)
    if place.split:
        step = with_separate_weights(step)
    graph, loss = planner.with_loss(step, loss if place.last else NO_LOSS)
    if place.split:
        graph = with_weight_boundary(step, graph)
    problem = stage_problem(
        step,
        graph,
        per_microbatch=() if place.first else ("batch",),
        tangents=("tangent",),
        between=loss.between + place.copied,
        loss_forward=loss.forward,
        as_captured=place.alone and loss.dense and _are_messages(step, received=not place.handed),
        template=template,
    )
    own = whole_outputs(step, problem.graph) if place.handed and place.alone else ()
    problem = replace(
        problem, released=True, handed=own, between=problem.between - place.handed + problem.bytes(own)
    )
    if place.freed:
        sent = whole_outputs(step, problem.graph)
        problem = replace(problem, freed=readers(step, problem.graph, sent))
    if place.alone and place.last:  # torch holds those of other stages until the backward ends
        problem = replace(problem, tangents_held=partial(_tangents_held, step, problem))
    return step, problem


def _are_messages(step: CapturedStep, received: bool) -> bool:
    """Return whether the outputs' gradients had at capture the strides with which they arrive: contiguous."""
    fakes = [step.values[i.value].fake for i in step.inputs if i.kind == "tangent"]
    return all(
        # Without receive buffers, the stride of a dimension of size 1 is arbitrary.
        fake.stride() == torch.empty(fake.shape, device="meta").stride() and (received or 1 not in fake.shape)
        for fake in fakes
    )


def _tangents_held(step: CapturedStep, problem: StageProblem, schedule: Schedule) -> int:
    return end_of_first_segment(step, schedule, backward_spare(problem, schedule))


def captured_step(stage: StageModule) -> CapturedStep:
    """Capture the forward and backward of a pipeline stage for one micro-batch as ATen calls. No inverses are added."""
    return capture_call(stage.module, *stage_arguments(stage))[1]


def stage_arguments(stage: StageModule) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """Return uninitialised arguments of a stage: positional and keyword arguments."""
    return pytree.tree_map(  # type: ignore[no-any-return]
        lambda one: _empty(one, stage.device), (stage.args, dict(stage.kwargs))
    )


def _empty(like: Any, device: torch.device) -> Any:
    """Return an uninitialised tensor on ``device`` with the shape, strides, type and ``requires_grad`` of the tensor
    ``like``. Anything else than a tensor is returned unchanged."""
    if not isinstance(like, torch.Tensor):
        return like
    empty = torch.empty_strided(like.shape, like.stride(), dtype=like.dtype, device=device)
    return empty.requires_grad_(like.requires_grad)
