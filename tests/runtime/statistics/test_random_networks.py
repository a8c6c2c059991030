"""Statistics of networks that hypothesis draws, under plans at drawn budgets and with every layer run again."""

import copy
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from statistics_models import MODELS
from statistics_reference import error, expected
from torch import Tensor, nn

import rematplan
from rematplan.ir import InfeasibleBudget
from rematplan.planner.core.schedule import Free, Run, Schedule
from rematplan.runtime.capture.capture import capture
from rematplan.runtime.costs.device_models import device_model
from rematplan.runtime.costs.roofline import roofline_costs
from rematplan.runtime.execute.compiled_plan import CompiledPlan
from rematplan.runtime.graph.captured_step import CapturedStep
from rematplan.runtime.problem.loss_boundary import LOSS, with_loss_boundary
from rematplan.runtime.problem.planning_problem import training_graph
from rematplan.runtime.problem.policy import ops_that_run_once
from rematplan.runtime.statistics.fisher_output_gradients import Draws
from rematplan.runtime.statistics.insert import with_statistics
from rematplan.runtime.statistics.options import Kronecker
from rematplan.runtime.statistics.recorder import Recorder

PROFILE = settings(max_examples=5, deadline=None, derandomize=True)
ACTIVATIONS = (nn.Tanh, nn.GELU, nn.Sigmoid)


@pytest.fixture(autouse=True)
def _double() -> Iterator[None]:
    torch.set_default_dtype(torch.float64)
    yield
    torch.set_default_dtype(torch.float32)


@st.composite
def networks(draw: st.DrawFn) -> tuple[nn.Module, Tensor]:
    """Convolutions, some transposed or grouped, or linear layers on a sequence; then a linear layer."""
    torch.manual_seed(draw(st.integers(0, 100)))
    samples, layers = draw(st.integers(2, 5)), []
    if draw(st.booleans()):
        width = 4
        x = torch.randn(samples, width, 12, 11)
        for _ in range(draw(st.integers(1, 3))):
            kind, wide = draw(st.sampled_from((nn.Conv2d, nn.ConvTranspose2d))), draw(st.sampled_from((2, 4)))
            how = {"groups": draw(st.sampled_from((1, 2))), "bias": draw(st.booleans())}
            how |= {"padding": draw(st.integers(0, 1)), "stride": draw(st.integers(1, 2))}
            layers += [
                kind(width, wide, draw(st.integers(1, 2)), **how),
                draw(st.sampled_from(ACTIVATIONS))(),
            ]
            width = wide
        layers += [nn.AdaptiveAvgPool2d(2), nn.Flatten()]
    else:
        x = torch.randn(samples, draw(st.integers(1, 4)), draw(st.integers(1, 5)))
    wide = nn.Sequential(*layers)(x).shape[-1]
    for _ in range(draw(st.integers(1, 3))):
        to = draw(st.integers(1, 70))
        layers += [nn.Linear(wide, to, bias=draw(st.booleans())), draw(st.sampled_from(ACTIVATIONS))()]
        wide = to
    return nn.Sequential(*layers, nn.Linear(wide, 3)), x


def loss_of(y: Tensor, reduction: str) -> Tensor:
    terms = (y.cos() * torch.arange(1.0, y.shape[-1] + 1)).logsumexp(-1)
    return terms.mean() if reduction == "mean" else terms.sum()


@PROFILE
@given(networks(), st.floats(0, 1), st.sampled_from(("expand", "reduce")), st.sampled_from(("mean", "sum")))
def test_statistics_of_any_network_under_any_plan(
    made: tuple[nn.Module, Tensor], share: float, approx: str, reduction: str
) -> None:
    model, x = made
    terms = model(x).numel() // 3
    scale = terms if reduction == "mean" else 1
    plain = copy.deepcopy(model)
    wanted = expected(plain, lambda m: loss_of(m(x), reduction).backward(), approx == "reduce", scale)
    options = Kronecker(fisher="empirical", approx=approx, loss_reduction=reduction)
    own = planned(model, x, share, options)
    loss_of(own(x), reduction).backward()
    found = rematplan.planning(own).statistics()
    assert set(found.factors) == set(wanted)
    for name, one in wanted.items():
        assert error(found.factors[name].a, one.a) < 1e-12
        assert error(found.factors[name].g, one.g) < 1e-12
        assert (found.factors[name].rows, found.factors[name].samples) == (one.rows, terms)
    for one, other in zip(own.parameters(), plain.parameters(), strict=True):
        assert torch.equal(one.grad, other.grad)


def planned(model: nn.Module, x: Tensor, share: float, options: Kronecker) -> nn.Module:
    """A copy, planned at a share of the peak without recomputation, or at the least peak if that is larger."""
    settings_: dict[str, Any] = {"strategy": "approx_dp", "costs": "roofline", "statistics": options}
    try:
        return rematplan.plan_module(
            copy.deepcopy(model), (x,), budget=f"{max(1.0, 100 * share):.1f}%", **settings_
        )
    except InfeasibleBudget:
        return rematplan.plan_module(copy.deepcopy(model), (x,), budget="min", **settings_)


def everything_twice(step: CapturedStep) -> Schedule:
    """A schedule that runs each op of the forward half again right before the backward half, but for those that may
    run once only; and frees what it made the first time."""
    graph = with_loss_boundary(step, training_graph(step, roofline_costs(step, device_model("laptop-cpu"))))
    once = {*graph.never_rerun, *ops_that_run_once(step)}
    boundary = [op.name for op in graph.ops].index(LOSS)
    early, late = graph.ops[:boundary], graph.ops[boundary:]
    kept = {t for op in early if op.name in once for t in op.writes} | set(graph.outputs)
    again = [op for op in early if op.name not in once]
    schedule: list[Run | Free] = [Run(op.name) for op in (*early, late[0])]
    schedule += [Free(t) for op in again for t in op.writes if t not in kept]
    schedule += [Run(op.name) for op in again]
    return (*schedule, *(Run(op.name) for op in late[1:]))


def convolutional() -> tuple[nn.Module, Tensor]:
    return nn.Sequential(
        nn.Conv2d(2, 4, 3), nn.GELU(), nn.Flatten(), nn.Linear(64, 8), nn.Tanh(), nn.Linear(8, 3)
    ), torch.randn(5, 2, 6, 6)


@pytest.mark.parametrize(
    ("network", "fisher"),
    [(convolutional, "empirical"), (MODELS["gpt"], "mc"), (MODELS["attention"], "empirical")],
)
def test_a_forward_that_runs_twice_is_summed_once(
    network: Callable[[], tuple[nn.Module, Tensor]], fisher: str
) -> None:
    torch.manual_seed(0)
    model, x = network()
    plain = nn.Module()
    plain.model = model
    plain.forward = lambda x: (model(x),)
    found = []
    for twice in (False, True):
        recorder = Recorder(Kronecker(fisher=fisher))
        made = with_statistics(capture(plain, (x,), "net"), recorder.options, Draws(0))
        sums = {c.name for c in made.step.calls if c.late}
        assert sums <= set(ops_that_run_once(made.step))
        schedule = everything_twice(made.step)
        runs = [one.op for one in schedule if isinstance(one, Run)]
        assert max(map(runs.count, runs)) == 2
        if not twice:
            seen: set[str] = set()
            schedule = tuple(
                one for one in schedule if isinstance(one, Run) and not (one.op in seen or seen.add(one.op))
            )
        compiled = CompiledPlan(made.step, schedule)
        assert "statistics" not in compiled.halves.source.split("def backward_0")[0]
        recorder.forward([], accumulating=False)
        (y,) = compiled(dict(model.named_parameters()), [x], statistics=recorder.sink(made))
        y.square().mean().backward()
        found.append(recorder.statistics().factors)
    for name, factors in found[0].items():
        assert torch.equal(factors.a, found[1][name].a)
        assert torch.equal(factors.g, found[1][name].g)
    wanted = expected(copy.deepcopy(model), lambda m: m(x).square().mean().backward(), reduce=False)
    for name in wanted.keys() & found[1].keys():
        assert error(found[1][name].a, wanted[name].a) < 1e-12
    assert wanted.keys() & found[1].keys()
