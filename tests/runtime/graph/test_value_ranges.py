"""Laws of ranges: nothing ever lies outside; a scale is inverted only if its range keeps away from zero."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache

import pytest
import torch
from planned_steps import PlannedStep, bound, problem, run_once, verify
from torch import Tensor, nn
from torch.nn import functional

from rematplan.ir import ModelError
from rematplan.planner.core.inversion_error import worst_error
from rematplan.planner.strategies.reversible import Reversible
from rematplan.runtime.capture.capture import capture
from rematplan.runtime.costs.device_models import device_model
from rematplan.runtime.costs.roofline import roofline_costs
from rematplan.runtime.execute.compile import named_tensors
from rematplan.runtime.graph.captured_step import CapturedStep, Ref
from rematplan.runtime.graph.constant_values import KnownValues
from rematplan.runtime.graph.value_ranges import Ranges
from rematplan.runtime.inversion.find_inverses import with_inverses

SCALES: dict[str, tuple[Callable[[Tensor, Tensor], Tensor], bool]] = {
    "exp of tanh": (lambda s, p: s.tanh().exp(), True),
    "sigmoid and a half": (lambda s, p: 0.5 + s.sigmoid(), True),
    "two minus tanh": (lambda s, p: torch.sub(2, s.tanh(), alpha=1.5), True),
    "exp of clamp": (lambda s, p: s.clamp(-2, 0.5).exp(), True),
    "clamp from below": (lambda s, p: s.clamp(min=0.3).neg().clamp(min=-4), True),
    "hardtanh": (lambda s, p: functional.hardtanh(s, 0.2, 0.7), True),
    "negative": (lambda s, p: -(s.sin() + 1.25) / 2, True),
    "times a parameter": (lambda s, p: (s.tanh() * p).exp(), True),
    "chunk of tanh": (lambda s, p: (torch.cat([s, s], -1).tanh().chunk(2, -1)[1] / 3).exp(), True),
    "sigmoid": (lambda s, p: s.sigmoid(), False),
    "exp": (lambda s, p: s.exp(), False),
    "softplus": (lambda s, p: functional.softplus(s) + 0.1, False),
    "one plus tanh": (lambda s, p: 1 + s.tanh(), False),
    "itself": (lambda s, p: s, False),
    "relu": (lambda s, p: s.relu() + 0.0001, False),
    "softplus that falls": (lambda s, p: (functional.softplus(s, -1.0) + 1).clamp(max=4), False),
    "bits of another type": (lambda s, p: 2 + s.detach().tanh().view(torch.int64) * 4e-19, False),
    "zero or one": (lambda s, p: (s.sigmoid() + 0.5).int(), False),
    "exp of sums": (lambda s, p: (s.tanh() * 9).exp(), False),
}
"""Scales of a coupling, and whether they are inverted."""


class Affine(nn.Module):
    def __init__(self, scale: Callable[[Tensor, Tensor], Tensor], divide: bool) -> None:
        super().__init__()
        self.scale, self.divide = scale, divide
        self.functions = nn.ModuleList(
            nn.Sequential(nn.Linear(8, 16), nn.GELU(), nn.Linear(16, 8)) for _ in range(6)
        )
        self.p = nn.Parameter(torch.linspace(0.5, 1.0, 8))

    def forward(self, x: Tensor) -> Tensor:
        a, b = x.chunk(2, -1)
        for s, t in zip(self.functions[::2], self.functions[1::2], strict=True):
            scale = self.scale(3 * s(b), self.p)
            a, b = b, (a / scale if self.divide else a * scale) + t(b)
        return torch.cat([a, b], -1).square().mean()


def made(name: str, divide: bool) -> tuple[nn.Module, Tensor, CapturedStep]:
    torch.manual_seed(0)
    model, x = Affine(SCALES[name][0], divide).double(), torch.randn(32, 16, dtype=torch.float64)
    return model, x, with_inverses(capture(model, (x,), "affine"), named_tensors(model)).step


shared = cache(made)
"""Of tests that leave the model as it is."""


@pytest.mark.parametrize(
    ("name", "divide"),
    [
        *((name, False) for name in SCALES),
        ("exp of clamp", True),
        ("times a parameter", True),
        ("relu", True),
    ],
)
def test_a_coupling_is_inverted_through_a_scale_that_keeps_away_from_zero(name: str, divide: bool) -> None:
    model, x, step = shared(name, divide)
    kernels = {fill.kernel for call in step.inverses for fill in call.target.fills}
    watched, plain = ("multiply", "product") if divide else ("divide", "quotient")
    kernel = watched if name == "times a parameter" else plain
    assert (kernel in kernels) == SCALES[name][1]
    if not SCALES[name][1]:
        return
    graph = problem(step, roofline_costs(step, device_model("laptop-cpu")))
    plan = Reversible().curve(graph, ())[-1]
    predicted = worst_error(graph, plan.schedule)
    assert 0 < predicted < 1e-10
    assert 0 < verify(PlannedStep(model, step, plan.schedule), (x,), predicted=predicted).error < 1e-10


@pytest.mark.parametrize("name", SCALES)
def test_no_value_is_outside_its_range(name: str) -> None:
    model, x, step = shared(name, False)
    ranges = Ranges(step, KnownValues(step, named_tensors(model)))
    seen = 0
    for size in (1.0, 100.0):
        known = bound(step, model, (size * x,))
        for call in step.calls:
            if call.backward:
                continue
            with torch.no_grad():
                found = call.target(*_filled(call.args, known), **_filled(call.kwargs, known))
            for result, tensor in zip(call.results, (found,) if call.single else found, strict=True):
                if result:
                    known[result] = tensor
                    bounds, numbers = ranges(Ref(result)), tensor[~tensor.isnan()]
                    assert ((bounds.low <= numbers) & (numbers <= bounds.high)).all(), call.name
                    seen += bounds.low > -torch.inf
    assert seen or name == "itself"


def _filled(args: object, known: dict[str, Tensor]) -> object:
    if isinstance(args, Ref):
        return known[args.value]
    if isinstance(args, (tuple, list)):
        return type(args)(_filled(a, known) for a in args)
    return {k: _filled(a, known) for k, a in args.items()} if hasattr(args, "items") else args


def test_a_scale_that_training_moved_near_zero_is_refused_at_run_time() -> None:
    model, x, step = made("times a parameter", divide=False)
    graph = problem(step, roofline_costs(step, device_model("laptop-cpu")))
    planned = PlannedStep(model, step, Reversible().curve(graph, ())[-1].schedule)
    run_once(planned, (x,))
    with torch.no_grad():
        model.p.fill_(20.0)
    with pytest.raises(ModelError, match="has come near zero"):
        run_once(planned, (x,))
