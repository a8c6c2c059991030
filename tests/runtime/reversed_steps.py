"""Steps that keep the least: what tests of inversion make of a model, and what its plan holds."""

from collections.abc import Callable

from planned_steps import PlannedStep, problem, verify
from torch import Tensor, nn

from rematplan.ir import TrainingGraph
from rematplan.planner.core.inversion_error import with_anchors, worst_error
from rematplan.planner.core.plan import Plan
from rematplan.planner.strategies.reversible import Reversible
from rematplan.runtime.capture.capture import capture
from rematplan.runtime.costs.device_models import device_model
from rematplan.runtime.costs.roofline import roofline_costs
from rematplan.runtime.execute.compile import named_tensors
from rematplan.runtime.graph.captured_step import CapturedStep
from rematplan.runtime.inversion.find_inverses import with_inverses

Functions = list[Callable[[Tensor], Tensor]]


def pairs(functions: Functions) -> list[tuple[Callable[[Tensor], Tensor], Callable[[Tensor], Tensor]]]:
    """F and G of each coupling."""
    return list(zip(functions[::2], functions[1::2], strict=True))


class MeanSquare(nn.Module):
    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model

    def forward(self, *x: Tensor) -> Tensor:
        return self.model(*x).square().mean()


def priced(step: CapturedStep) -> TrainingGraph:
    return problem(step, roofline_costs(step, device_model("laptop-cpu")))


def activations(plan: Plan, graph: TrainingGraph) -> int:
    return plan.estimate.peak - graph.input_bytes - sum(graph.size[t] for t in graph.outputs)


def reversed_step(model: nn.Module, *x: Tensor) -> tuple[CapturedStep, TrainingGraph, Plan]:
    return reversible(capture(model, x, "step"), model)


def reversible(step: CapturedStep, model: nn.Module) -> tuple[CapturedStep, TrainingGraph, Plan]:
    """The step with its inverses, its problem, the plan that keeps the least."""
    step = with_inverses(step, named_tensors(model)).step
    graph = with_anchors(priced(step))
    return step, graph, Reversible().curve(graph, ())[-1]


def gradient_error(model: nn.Module, step: CapturedStep, plan: Plan, *x: Tensor) -> float:
    outcome = verify(
        PlannedStep(model, step, plan.schedule), x, seed=5, predicted=worst_error(priced(step), plan.schedule)
    )
    assert outcome.passed, outcome.differences
    return outcome.error
