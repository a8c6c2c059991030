"""Scales that training changes after a plan was made: wrong gradients are never given without a word."""

from __future__ import annotations

import gc

import pytest
import torch
from planned_steps import PlannedStep, problem, run_once, verify
from torch import Tensor, nn

import rematplan
from rematplan.ir import ModelError
from rematplan.planner.core.inversion_error import with_anchors, worst_error
from rematplan.planner.overlap.place_on_lanes import on_two_lanes
from rematplan.planner.strategies.reversible import Reversible
from rematplan.runtime.capture.capture import capture
from rematplan.runtime.costs.device_models import device_model
from rematplan.runtime.costs.roofline import roofline_costs
from rematplan.runtime.execute.compile import named_tensors
from rematplan.runtime.graph.captured_step import CapturedStep
from rematplan.runtime.inversion import error_tracking
from rematplan.runtime.inversion.find_inverses import with_inverses

KINDS = ("times", "over", "lerp", "exp", "norm")


class Scaled(nn.Module):
    """Couplings that scale the stream that is added to, by parameters."""

    def __init__(self, kind: str = "times", blocks: int = 14) -> None:
        super().__init__()
        self.kind = kind
        self.functions = nn.ModuleList(nn.Sequential(nn.Linear(8, 8), nn.Tanh()) for _ in range(blocks))
        self.scales = nn.ParameterList(nn.Parameter(torch.full((8,), 0.9)) for _ in range(blocks))

    def scaled(self, a: Tensor, scale: Tensor, f: Tensor) -> Tensor:
        if self.kind == "lerp":
            return torch.lerp(a, f, 1 - scale)
        if self.kind == "norm":
            return nn.functional.layer_norm(a, (8,), scale) + f
        by = {
            "times": a * scale,
            "over": a / scale.reciprocal(),
            "exp": a * torch.exp(scale.log() * torch.cos(f)),
        }
        return by[self.kind] + f

    def forward(self, x: Tensor) -> Tensor:
        a, b = x.chunk(2, -1)
        for f, scale in zip(self.functions, self.scales, strict=True):
            a, b = b, self.scaled(a, scale, f(b))
        return torch.cat([a, b], -1).square().mean()

    def set(self, low: float, high: float) -> None:
        for scale in self.scales:
            scale.data.copy_(torch.linspace(low, high, 8))


def planned(model: nn.Module, captured: CapturedStep, lanes: bool = False) -> tuple[PlannedStep, float]:
    step = with_inverses(captured, named_tensors(model)).step
    graph = with_anchors(problem(step, roofline_costs(step, device_model("laptop-cpu"))))
    plan = Reversible().curve(graph, ())[-1]
    assert any(name.startswith("invert_") for name in graph.op if name in str(plan.schedule))
    both = on_two_lanes(graph, plan, 2**40) if lanes else None
    chosen = both or plan
    return PlannedStep(model, step, chosen.schedule, chosen.lanes), worst_error(graph, plan.schedule)


@pytest.mark.parametrize("kind", KINDS)
def test_a_step_whose_scales_have_fallen_too_far_is_refused(kind: str) -> None:
    torch.manual_seed(0)
    model, x = Scaled(kind), torch.randn(16, 16)
    captured = capture(model, (x,), "scaled")
    run, predicted = planned(model, captured)
    assert 0 < predicted < 1e-4
    assert verify(run, (x,), predicted=predicted).passed
    model.set(0.88, 0.92)  # a few steps of training
    assert verify(run, (x,), predicted=10 * predicted).passed
    model.set(0.02, 1.0)
    with pytest.raises(ModelError, match="plan again, or without inverses"):
        run_once(run, (x,))
    again, predicted = planned(model, captured)  # with more anchors
    assert verify(again, (x,), predicted=predicted).passed
    gc.collect()
    assert not error_tracking._rows


@pytest.mark.parametrize("lanes", [False, True])
def test_zero_is_refused_on_either_lane(lanes: bool) -> None:
    torch.manual_seed(0)
    model, x = Scaled("times", 6), torch.randn(16, 16)
    run, _ = planned(model, capture(model, (x,), "scaled"), lanes)
    run_once(run, (x,))
    model.scales[2].data[3] = 0.0
    with pytest.raises(
        ModelError, match=r"has come near zero \(its smallest absolute value 0 is below 0.001\)"
    ):
        run_once(run, (x,))
    model.scales[2].data[3] = 0.9
    run(x)


def test_a_planned_module_says_so_in_its_backward() -> None:
    torch.manual_seed(0)
    model, x = Scaled("times", 12), torch.randn(64, 16)
    module = rematplan.plan_module(model, (x,), budget="min", strategy="reversible", costs="roofline")
    module(x).backward()
    model.set(0.05, 0.05)
    with pytest.raises(ModelError, match="scales by which the plan divides have changed since it was made"):
        module(x).backward()
