"""Run a plan that was made before: of a network that was loaded with its loss, of a pipeline's stage."""

from __future__ import annotations

from collections.abc import Set
from dataclasses import dataclass

from torch import nn

from rematplan.ir import ModelError
from rematplan.module.captures import ReadyCapture
from rematplan.module.planned_module import planned_module
from rematplan.module.runner import Runner
from rematplan.module.shape_options import ShapeOptions
from rematplan.planner.core.plan import Plan
from rematplan.planner.core.strategy import Progress
from rematplan.plans.options import PlanOptions
from rematplan.plans.planner import Planner
from rematplan.plans.refining import StepPlan
from rematplan.runtime.graph.captured_step import Call, CapturedStep

ONE_SHAPE = ShapeOptions(dynamic=False)


@dataclass(frozen=True, kw_only=True)
class GivenPlan(Planner):
    """A planner that returns one plan, which was made before."""

    made: StepPlan
    """The plan. Its peak includes the gradients of earlier steps, if there can be any."""
    calls: tuple[object, ...]
    """The result of `ops_of` for the step that was planned."""

    @property
    def bounds_one_call(self) -> bool:
        """False: the budget may be for several calls together."""
        return False

    def plan(self, step: CapturedStep, first: bool = False, progress: Progress | None = None) -> StepPlan:
        """Return the plan; `ModelError` if the step runs other ops than it was made for."""
        del first, progress
        if ops_of(step) != self.calls:
            raise ModelError(
                f"{step.name} runs other ops, or ops of other types, than those that it was planned for; plan it again"
            )
        return self.made

    def with_gradients(self, step: CapturedStep, plan: Plan, gradients: int, names: Set[str]) -> None:
        """Return None: the plan is used whatever gradients of earlier steps there are."""


def module_with_plan(
    model: nn.Module,
    options: PlanOptions,
    made: StepPlan,
    calls: tuple[object, ...],
    capture: ReadyCapture | None,
) -> nn.Module:
    """Return a planned module, sharing the model's parameters and buffers, that follows a plan which was made before.
    ``calls``: `ops_of` the captured step without inverses. ``capture``: of that step, if it exists."""
    planner = GivenPlan(options, made=made, calls=calls)
    return planned_module(model, Runner(type(model).__name__, planner, ONE_SHAPE, ready=capture))


def ops_of(step: CapturedStep) -> tuple[object, ...]:
    """Return the ATen ops of a step in order, with the types of their results. They are equal if the same forward is
    captured again."""

    def types(call: Call) -> tuple[object, ...]:
        return tuple(getattr(step.values[r].fake, "dtype", None) for r in call.made)

    return tuple((call.target, types(call)) for call in step.calls)
