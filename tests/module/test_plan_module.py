"""Laws of the drop-in: what a loop sees of a planned module is what it sees of the model, bit by bit."""

import copy
import functools
import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
from same_bits import grads, same, same_grads
from torch import Tensor, nn
from torch.nn import functional

import rematplan
from rematplan.ir import InfeasibleBudget, ModelError, TrainingGraph, UsageError
from rematplan.planner.auto.auto_strategy import Auto
from rematplan.planner.core.plan import Plan
from rematplan.runtime.costs.measure import peak_above_entry


class Net(nn.Module):
    """Convolution, batch norm, dropout, tied weights, a dictionary out, an unused and a frozen parameter."""

    def __init__(self) -> None:
        super().__init__()
        self.conv = nn.Conv2d(3, 8, 3, padding=1)
        self.norm = nn.BatchNorm2d(8)
        self.more = nn.Sequential(
            *(nn.Sequential(nn.Conv2d(8, 8, 3, padding=1), nn.Tanh()) for _ in range(4))
        )
        self.first = nn.Linear(8, 8)
        self.second = nn.Linear(8, 8)
        self.second.weight = self.first.weight
        self.unused = nn.Parameter(torch.zeros(2))
        self.frozen = nn.Parameter(torch.ones(8), requires_grad=False)

    def forward(self, x: Tensor, *, scale: float = 1.0) -> dict[str, Any]:
        y = functional.relu(self.norm(self.conv(x)))
        y = functional.dropout(self.more(y), 0.3, self.training)
        y = self.second(torch.tanh(self.first(y.mean((2, 3)) * self.frozen)))
        return {"scores": y * scale, "view": y[:, :2], "sizes": (x.shape[0], None), "best": y.argmax(1)}


def loss_of(out: dict[str, Any]) -> Tensor:
    return out["scores"].pow(2).mean() + out["view"].sin().sum()


def images(n: int = 4) -> Tensor:
    return torch.randn(n, 3, 12, 12, generator=torch.Generator().manual_seed(n))


def planned_anew(**options: Any) -> tuple[nn.Module, nn.Module]:
    torch.manual_seed(0)
    model = Net()
    plain = copy.deepcopy(model)
    options = {"budget": "70%", "strategy": "approx_dp", "costs": "roofline"} | options
    return rematplan.plan_module(model, (images(),), **options), plain


planned_once = functools.cache(planned_anew)


def planned_and_plain(**options: Any) -> tuple[nn.Module, nn.Module]:
    """Copies of one planned module, with its plan, and of the model."""
    return planned_anew(**options) if options else copy.deepcopy(planned_once())


def test_it_is_the_model_to_look_at() -> None:
    planned, plain = planned_anew()
    assert isinstance(planned, Net)
    assert same(planned, plain)
    assert [n for n, _ in planned.named_parameters()] == [n for n, _ in plain.named_parameters()]
    assert grads(planned) == {}
    assert planned.plan.estimate.peak <= planned.plan.budget
    assert planned.plan.estimate.reruns > 0
    assert "def backward_0(held, " in planned.source


LOOPS: dict[str, Callable[[nn.Module, torch.optim.Optimizer], None]] = {}


def loop(
    f: Callable[[nn.Module, torch.optim.Optimizer], None],
) -> Callable[[nn.Module, torch.optim.Optimizer], None]:
    LOOPS[f.__name__] = f
    return f


@loop
def accumulated_and_clipped(model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    for n in (4, 4, 3):
        loss_of(model(images(n), scale=0.5)).backward()
    nn.utils.clip_grad_norm_([p for p in model.parameters() if p.grad is not None], 0.1)
    optimizer.step()


@loop
def two_forwards_before_two_backwards(model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    first, second = model(images()), model(images(4) + 1)
    loss_of(first).backward()
    loss_of(second).backward()
    optimizer.step()


@loop
def part_of_the_outputs(model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    model(images())["view"].sum().backward()
    optimizer.step()


@loop
def evaluation_between(model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    loss_of(model(images())).backward()
    model.eval()
    with torch.no_grad():
        model(images(2))
    loss_of(model(images())).backward()
    model.train()
    loss_of(model(images())).backward()
    optimizer.step()


@loop
def hooks(model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    handle = model.conv.weight.register_hook(lambda g: g * 2)
    loss_of(model(images())).backward()
    handle.remove()
    optimizer.step()


@loop
def twenty_steps(model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    del optimizer
    adam = torch.optim.AdamW(model.parameters(), lr=1e-3)
    for _ in range(20):
        adam.zero_grad()
        loss_of(model(images())).backward()
        adam.step()


@pytest.mark.parametrize("name", LOOPS)
def test_every_loop_ends_in_equal_bits(name: str) -> None:
    planned, plain = planned_and_plain()
    states = []
    for model in (planned, plain):
        torch.manual_seed(5)
        LOOPS[name](model, torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.5))
        states.append(torch.get_rng_state())
    assert same_grads(planned, plain)
    assert same(planned, plain)
    assert torch.equal(*states)


def test_autocast_has_a_separate_plan_and_autocast_s_accuracy() -> None:
    planned, plain = planned_and_plain()
    for model in (planned, plain):
        torch.manual_seed(5)
        with torch.autocast("cpu", torch.bfloat16):
            out = model(images())
        assert out["scores"].dtype == torch.bfloat16
        loss_of(out).backward()
    assert len(planned.plans) == 1  # the percentage is of this step; the plan for another one is dropped
    # Plain autocast casts a tied weight once for both its uses, the captured step once for each: other roundings.
    for name, grad in grads(plain).items():
        assert torch.allclose(grads(planned)[name], grad, rtol=0.05, atol=0.01), name
    planned.zero_grad()
    loss_of(planned(images())).backward()
    assert len(planned.plans) == 2


def test_outputs_keep_their_structure_and_inputs_get_gradients() -> None:
    planned, plain = planned_and_plain()
    found = []
    for model in (planned, plain):
        torch.manual_seed(1)
        x = images().requires_grad_()
        out = model(x)
        assert list(out) == ["scores", "view", "sizes", "best"]
        assert out["sizes"] == (4, None)
        assert not out["best"].requires_grad
        loss_of(out).backward()
        found.append((out["scores"], out["view"], out["best"], x.grad))
    assert all(torch.equal(a, b) for a, b in zip(*found, strict=True))


def test_several_planned_modules_and_a_planned_part() -> None:
    planned, plain = planned_and_plain()
    other, plain_other = planned_and_plain(budget="80%")
    torch.manual_seed(2)
    (loss_of(planned(images())) * loss_of(other(images()))).backward()
    torch.manual_seed(2)
    (loss_of(plain(images())) * loss_of(plain_other(images()))).backward()
    assert same_grads(planned, plain)
    assert same_grads(other, plain_other)


def test_the_promise_in_bytes() -> None:
    torch.manual_seed(0)
    model = nn.Sequential(*(nn.Sequential(nn.Linear(64, 64), nn.Tanh()) for _ in range(16)))
    x = torch.randn(4096, 64)
    planned = rematplan.plan_module(model, (x,), budget="75%", strategy="approx_dp")
    resident = sum(p.nbytes for p in model.parameters()) + x.nbytes
    peak, _ = peak_above_entry(lambda: planned(x).backward(torch.ones(4096, 64)), torch.device("cpu"))
    assert resident + peak <= planned.plan.budget
    model.zero_grad()
    eager, _ = peak_above_entry(lambda: model(x).backward(torch.ones(4096, 64)), torch.device("cpu"))
    assert resident + peak < 0.8 * (resident + eager)


def test_planning_leaves_the_model_and_the_generator_alone() -> None:
    torch.manual_seed(0)
    model = Net()
    model.conv.weight.grad = torch.ones_like(model.conv.weight)
    before, state = copy.deepcopy(model), torch.get_rng_state()
    rematplan.plan_module(model, (images(),), budget="100%", strategy="store_all", costs="roofline")
    assert same(model, before)
    assert torch.equal(torch.get_rng_state(), state)
    assert torch.equal(model.conv.weight.grad, before.conv.weight * 0 + 1)


def test_a_plan_for_another_shape_begins_with_the_first(monkeypatch: pytest.MonkeyPatch) -> None:
    met, search = [], Auto.plan

    def seen(self: Auto, graph: TrainingGraph, budget: int, progress: Any, starts: Any) -> Plan:
        met.append((self.time_limit, [p.estimate.peak <= budget for p in starts]))
        return search(self, graph, budget, progress, starts)

    monkeypatch.setattr(Auto, "plan", seen)
    planned, plain = planned_and_plain(strategy=rematplan.Auto(reuse=False, time_limit=1.0))
    for model in (planned, plain):
        torch.manual_seed(1)
        loss_of(model(images(3))).backward()
    assert same_grads(planned, plain)
    planned.zero_grad()  # else the next step would be planned for earlier gradients, too
    planned.eval()
    loss_of(planned(images())).backward()  # without dropout and running statistics: other ops
    assert [limit for limit, _ in met] == [1.0, 0.25, 1.0]
    assert met[0][1] == []
    assert True in met[1][1]


@pytest.mark.parametrize(
    "wrong",
    [
        {"strategy": 5},
        {"costs": None},
        {"inverses": "yes"},
        {"inverses": -1.0},
        {"inverses": 0.0},
        *({"strategy": Auto(time_limit=limit)} for limit in (math.nan, 0, -1.0, math.inf, "30")),
        {"strategy": Auto(two_lanes="maybe")},
        {"strategy": Auto(lane_speed=0.4)},
        {"dynamic_shapes": 5},
        {"statistics": {}},
        {"statistics": 5},
        {"refine": "off"},
    ],
)
def test_an_argument_of_a_wrong_kind_is_named_in_one_line(wrong: dict[str, Any]) -> None:
    (name,) = wrong
    named = "auto: [a-z_]*" if isinstance(wrong[name], Auto) else name
    with pytest.raises(UsageError, match=f"^{named} is [^\\n]*$"):
        planned_and_plain(**wrong)


def test_what_cannot_be_is_said() -> None:
    with pytest.raises(InfeasibleBudget) as caught:
        planned_and_plain(budget=1000)
    assert caught.value.smallest > 1000
    assert "the proven least is" in str(caught.value)
    with pytest.raises(UsageError, match="not understood"):
        planned_and_plain(budget="lots")
    with pytest.raises(UsageError, match="path is 5"):
        rematplan.SavedPlan(5)
    with pytest.raises(UsageError, match="kwargs is a list"):
        rematplan.plan_module(nn.Linear(2, 2), (), [torch.ones(2)], budget="1GiB")
    with pytest.raises(UsageError, match="unknown costs"):
        planned_and_plain(costs="profiled")
    planned, _ = planned_anew(dynamic_shapes=False)
    with pytest.raises(ModelError, match="dynamic_shapes=False"):
        planned(images(2))
    loss = loss_of(planned(images()))
    loss.backward()
    with pytest.raises(RuntimeError, match="a second time"):
        loss.backward()
    out = loss_of(planned(images()))
    with torch.no_grad():
        planned.conv.weight.mul_(2)
    with pytest.raises(RuntimeError, match="in place"):
        out.backward()
    planned, _ = planned_and_plain()
    x = images().requires_grad_()
    for loss in (loss_of(planned(x)), planned(x)["scores"].sum()):
        (g,) = torch.autograd.grad(loss, x, create_graph=True)
        with pytest.raises(RuntimeError, match="no second derivatives"):
            g.sum().backward(retain_graph=True)
        # Not zero, as it would be if the gradient did not hang on what it is differentiated by.
        with pytest.raises(RuntimeError, match="no second derivatives"):
            torch.autograd.grad(g.sum(), x, allow_unused=True)
    out = planned(x)["scores"]
    with pytest.raises(RuntimeError, match="one gradient at a time"):
        torch.autograd.grad(out, x, torch.ones(2, *out.shape), is_grads_batched=True)


def test_moving_and_loading_after_planning() -> None:
    planned, plain = planned_and_plain()
    state = {k: v + 1 if v.is_floating_point() else v for k, v in plain.state_dict().items()}
    planned.load_state_dict(state)
    plain.load_state_dict(state)
    for model in (planned.double(), plain.double()):
        torch.manual_seed(3)
        loss_of(model(images().double())).backward()
    assert same_grads(planned, plain)
    assert len(planned.plans) == 1  # the percentage is of this step; the plan for another one is dropped


def test_tensors_that_are_swapped_and_assigned_after_planning() -> None:
    planned, plain = planned_and_plain()
    for model in (planned, plain):
        model.load_state_dict({k: v.clone() for k, v in plain.state_dict().items()}, assign=True)
        torch.utils.swap_tensors(model.conv.weight, nn.Parameter(torch.ones_like(model.conv.weight)))
        torch.manual_seed(3)
        loss_of(model(images())).backward()
    assert same_grads(planned, plain)
    assert len(planned.plans) == 1  # the weights that were tied are two now: it is another step that trains


def test_hooks_of_the_module_run_once_a_call() -> None:
    planned, _ = planned_and_plain()
    seen: list[str] = []
    planned.register_forward_pre_hook(lambda _m, _a: seen.append("before"))
    planned.register_forward_hook(lambda _m, _a, _o: seen.append("after"))
    planned(images())
    planned(images(3))  # a plan is made on the way
    with torch.no_grad():
        planned(images())
    assert seen == ["before", "after"] * 3
