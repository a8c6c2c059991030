"""Laws of training that bypasses a plan: it is said once, where it happens, and nothing else is."""

import copy
import inspect
import pickle
import warnings
from collections.abc import Callable

import pytest
import torch
from same_bits import SETTINGS, X, planned_and_plain
from torch import Tensor, nn

import rematplan


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


def net() -> nn.Module:
    return rematplan.plan_module(Net(), (X,), **SETTINGS)


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
