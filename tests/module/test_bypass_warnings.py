"""Laws of training that bypasses a plan: it is said once, where it happens, and nothing else is."""

import copy
import inspect
import pickle
import warnings
from collections.abc import Callable
from functools import cache
from typing import Any

import pytest
import torch
from same_bits import SETTINGS, X, planned_and_plain
from torch import Tensor, nn

import rematplan
from rematplan.module.captures import Captures


class Net(nn.Module):
    """Has methods that compute past the forward, and methods that do not."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(16, 16), nn.Linear(16, 16)

    def forward(self, x: Tensor) -> Tensor:
        return self.second(self.first(x).tanh())

    def encode(self, x: Tensor) -> Tensor:
        return self.first(x)

    def training_step(self, x: Tensor) -> dict[str, Tensor]:
        return {"loss": self.encode(x).sum()}

    def optimizer_step(self, closure: Callable[[], None]) -> None:
        closure()

    def before(self, x: Tensor) -> Tensor:
        return self(self.first(x)).sum()

    def after(self, x: Tensor) -> Tensor:
        return self.second(self(x)).sum()

    def planned_step(self, x: Tensor, scale: float = 2.0) -> Tensor:
        return self.loss(self(x)) * scale

    def loss(self, y: Tensor) -> Tensor:
        return y.pow(2).mean()


PASSING = "outside of its planned forward: that part of the step has no plan"
NOT_RUN = "a backward gave gradients to parameters of Net, whose planned forward has not run"


@cache
def net_once() -> nn.Module:
    return rematplan.plan_module(Net(), (X,), **SETTINGS)


def net() -> nn.Module:
    return copy.deepcopy(net_once())  # with its plan


@pytest.mark.parametrize("name", ["encode", "before", "after"])
def test_a_method_that_bypasses_the_plan_is_told_of_once(name: str) -> None:
    planned = net()
    planned(X).sum().backward()
    with pytest.warns(UserWarning, match=rf"^Net\.{name} computes .* {PASSING}") as said:
        getattr(planned, name)(X).sum().backward()
    assert [one.filename for one in said] == [__file__]
    with warnings.catch_warnings(action="error"):
        getattr(planned, name)(X).sum().backward()


def test_of_calls_inside_of_each_other_the_innermost_is_told_of() -> None:
    planned = net()

    def step() -> None:
        planned.optimizer_step(lambda: planned.training_step(X)["loss"].backward())

    with pytest.warns(UserWarning, match=PASSING) as said:
        step()
    assert [str(one.message).split()[0] for one in said] == ["Net.encode"]
    with warnings.catch_warnings(action="error"):
        step()


def test_what_follows_the_plan_is_not_told_of() -> None:
    planned = net()
    with warnings.catch_warnings(action="error"):
        planned.planned_step(X).backward()
        planned.optimizer_step(lambda: planned.planned_step(X).backward())
        planned.loss(planned(X)).backward()
        with torch.no_grad():
            planned.encode(X)
        planned.requires_grad_(False)
        planned.encode(X.clone().requires_grad_()).sum().backward()


@pytest.mark.parametrize("train", [lambda model, planned: model(X), lambda model, planned: planned.first(X)])
def test_training_the_original_or_a_part_in_place_of_the_planned_module_is_told_of(
    train: Callable[[nn.Module, nn.Module], Tensor],
) -> None:
    model = Net()
    planned = rematplan.plan_module(model, (X,), **SETTINGS)
    with pytest.warns(UserWarning, match=NOT_RUN) as said:
        train(model, planned).sum().backward()
    assert [one.filename for one in said] == [__file__]
    with warnings.catch_warnings(action="error"):
        train(model, planned).sum().backward()


def test_a_method_of_a_model_that_is_planned_in_place_is_told_of() -> None:
    model = rematplan.apply(Net(), budget="min", strategy="approx_dp", costs="roofline")
    with pytest.warns(UserWarning, match=NOT_RUN):
        model.encode(X).sum().backward()
    model = rematplan.apply(Net(), budget="min", strategy="approx_dp", costs="roofline")
    with warnings.catch_warnings(action="error"):
        model(X).sum().backward()


def test_a_planned_call_ends_the_watch_for_other_backwards() -> None:
    model = Net()
    planned = rematplan.plan_module(rematplan.plan_module(model, (X,), **SETTINGS), (X,), **SETTINGS)
    own: list[Tensor] = []
    hook = model.first.weight.register_post_accumulate_grad_hook(own.append)
    copies = [copy.copy(planned), copy.deepcopy(planned), pickle.loads(pickle.dumps(planned))]
    with warnings.catch_warnings(action="error"):
        for one in (planned, model, *copies):
            one(X).sum().backward()
    assert len(own) == 3
    hook.remove()
    assert not any(p._post_accumulate_grad_hooks for p in model.parameters())


def test_methods_are_the_model_s() -> None:
    planned, plain = planned_and_plain(Net())
    assert inspect.signature(planned.planned_step) == inspect.signature(plain.planned_step)
    assert planned.loss.__self__ is planned
    before = Net.loss
    try:
        Net.loss = lambda self, y: y.sum()
        assert torch.equal(planned.loss(X), X.sum())
    finally:
        Net.loss = before


class Pair(nn.Module):
    """Two networks, of which a call runs one, as those of a generative adversarial network."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.made = nn.Sequential(nn.Linear(8, 32), nn.BatchNorm1d(32), nn.Tanh(), nn.Linear(32, 8))
        self.judged = nn.Sequential(nn.Linear(8, 32), nn.Tanh(), nn.Linear(32, 1))

    def forward(self, x: Tensor) -> Tensor:
        return self.made(x)


def adversaries(model: Any, steps: int = 20) -> list[Tensor]:
    """Train both networks by turns, each with the other one frozen; the frozen generator is called with gradients
    enabled, as in tutorials."""
    own = model.made, model.judged
    optimizers = [torch.optim.Adam(one.parameters(), lr=1e-2) for one in own]
    x, losses = torch.randn(64, 8, generator=torch.Generator().manual_seed(0)), []
    for at in range(steps):
        for turn in (1, 0) if at % 2 else (0, 1):
            own[1 - turn].requires_grad_(requires_grad=False)
            made = model(x)
            loss = model.judged(made).mean() if turn == 0 else model.judged(made.detach() - x).square().mean()
            loss.backward()
            optimizers[turn].step()
            optimizers[turn].zero_grad()
            own[1 - turn].requires_grad_()
            losses.append(loss.detach())
    return [*losses, *model.state_dict().values()]


@pytest.mark.filterwarnings("error:.*computes with parameters")
@pytest.mark.parametrize("first", [0, 1], ids=["trained first", "frozen first"])
def test_a_frozen_generator_of_a_planned_model_runs_as_it_is(first: int, monkeypatch: Any) -> None:
    plain, planned = Pair(), rematplan.apply(Pair(), **{**SETTINGS, "budget": "100%"})
    captures: list[Any] = []
    capture = Captures._captured

    def counted(*given: Any) -> Any:
        captures.append(given)
        return capture(*given)

    monkeypatch.setattr(Captures, "_captured", counted)
    for one in (plain, planned):
        one.made.requires_grad_(requires_grad=not first)
        one(torch.randn(64, 8, generator=torch.Generator().manual_seed(1)))
        one.made.requires_grad_()
    found = adversaries(planned)
    assert all(map(torch.equal, found, adversaries(plain)))
    assert rematplan.planning(planned).plans
    assert len(captures) <= 3  # of the trained and the frozen generator: each kind of call once


def test_a_call_that_was_taken_for_untrained_and_trains_is_told_of() -> None:
    class Sometimes(Pair):
        def forward(self, x: Tensor) -> Tensor:
            return self.made(x) if switch else x * 2

    switch: list[int] = []
    model, x = rematplan.apply(Sometimes(), **{**SETTINGS, "budget": "100%"}), torch.randn(64, 8)
    model(x)
    switch.append(1)
    with pytest.warns(
        UserWarning, match="a call of Sometimes computes with parameters of the planned Sometimes"
    ):
        assert model(x).requires_grad


def test_an_object_that_hides_its_tensors_is_not_taken_for_untrained() -> None:
    class Output:
        def __init__(self, made: Tensor) -> None:
            self.made = made

    class Hidden(Pair):
        def forward(self, x: Tensor) -> Tensor:
            hidden: Any = Output(super().forward(x))
            return hidden

    model, plain = rematplan.apply(Hidden(), **{**SETTINGS, "budget": "100%"}), Hidden()
    for one in (model, plain):
        made: Any = one(torch.ones(64, 8))
        made.made.square().sum().backward()
    assert all(
        (a.grad is None and b.grad is None) or torch.equal(a.grad, b.grad)
        for a, b in zip(model.parameters(), plain.parameters(), strict=True)
    )
    assert rematplan.planning(model).plans
