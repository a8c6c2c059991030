"""Functions whose backward calls a module again, as adjoints of ODE networks and reversible networks do."""

from __future__ import annotations

import copy
import re
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import rematplan


class Again(torch.autograd.Function):
    """Runs a module without a graph, and again, with one, in the backward."""

    @staticmethod
    def forward(context: Any, module: nn.Module, x: Tensor, *parameters: Tensor) -> Any:
        context.module = module
        context.save_for_backward(x, *parameters)
        with torch.no_grad():
            return module(x)

    @staticmethod
    def backward(context: Any, *gradients: Any) -> Any:
        x, *parameters = context.saved_tensors
        with torch.enable_grad():
            x = x.detach().requires_grad_()
            y = context.module(x)
        found = torch.autograd.grad(y, (x, *parameters), gradients, allow_unused=True)
        return None, *found


class Net(nn.Module):
    """Calls its middle by ``function``."""

    def __init__(self, *middle: nn.Module, first: bool = True, function: Any = Again) -> None:
        super().__init__()
        self.function = function
        self.first = nn.Linear(8, 8) if first else nn.Identity()
        self.middle = nn.Sequential(nn.Linear(8, 32), *middle, nn.Tanh(), nn.Linear(32, 8))

    def forward(self, x: Tensor) -> Any:
        return self.function.apply(self.middle, self.first(x), *self.middle.parameters())


MODELS: dict[str, Callable[[], nn.Module]] = {
    "after a layer": Net,
    "on the batch itself": lambda: Net(first=False),
    "twice": lambda: nn.Sequential(Net(), Net()),
    "with batch norm": lambda: Net(nn.BatchNorm1d(32)),
    "with spectral norm": lambda: Net(nn.utils.parametrizations.spectral_norm(nn.Linear(32, 32))),
}


@pytest.mark.parametrize("name", MODELS)
def test_the_backward_finds_the_parameters_of_the_step(name: str) -> None:
    torch.manual_seed(0)
    model = MODELS[name]()
    planned = rematplan.apply(copy.deepcopy(model), "100%", costs="roofline")
    for _ in range(3):
        batch = torch.randn(16, 8)
        for one in (model, planned):
            one.zero_grad()
            one(batch).square().mean().backward()
        for (where, ours), theirs in zip(planned.named_parameters(), model.parameters(), strict=True):
            assert theirs.grad is not None, where
            assert ours.grad is not None, where
            assert torch.equal(ours.grad, theirs.grad), where
        for (where, ours), theirs in zip(planned.named_buffers(), model.buffers(), strict=True):
            assert torch.equal(ours, theirs), where
    assert rematplan.planning(planned).plans


class Adding(Again):
    """As `Again`, but its backward adds the gradients of parameters by itself, as reversible networks do."""

    @staticmethod
    def backward(context: Any, *gradients: Any) -> Any:
        x, *parameters = context.saved_tensors
        x = x.detach().requires_grad_()
        with torch.enable_grad():
            y = context.module(x)
        torch.autograd.backward(y, gradients)
        return None, x.grad, *(None for _ in parameters)


class Freeing(nn.Module):
    """Frees the memory of its input, as reversible networks do."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(8, 8)

    def forward(self, x: Tensor) -> Tensor:
        y = self.layer(x)
        z = y.tanh()
        y.untyped_storage().resize_(0)
        return z


class Seeding(Again):
    """As `Again`, but its backward draws the same random numbers again."""

    @staticmethod
    def forward(context: Any, module: nn.Module, x: Tensor, *parameters: Tensor) -> Any:
        context.state = torch.get_rng_state()
        return Again.forward(context, module, x, *parameters)

    @staticmethod
    def backward(context: Any, *gradients: Any) -> Any:
        with torch.random.fork_rng(devices=[]):
            torch.set_rng_state(context.state)
            return Again.backward(context, *gradients)


class Setting(Again):
    """As `Again`, but its backward sets the gradients of parameters."""

    @staticmethod
    def backward(context: Any, *gradients: Any) -> Any:
        _, x, *found = Again.backward(context, *gradients)
        for parameter, gradient in zip(context.saved_tensors[1:], found, strict=True):
            parameter.grad = gradient if parameter.grad is None else parameter.grad + gradient
        return None, x, *(None for _ in found)


@pytest.mark.parametrize(
    ("model", "why"),
    [
        (Net(function=Adding), "a backward of it calls backward()"),
        (Freeing(), "it frees or changes the memory"),
        (Net(nn.Dropout(0.5), function=Seeding), "the model seeds the random numbers"),
        (Net(function=Setting), "uses the gradient (.grad)"),
    ],
)
def test_what_reversible_networks_do_besides_computing_has_no_plan(model: nn.Module, why: str) -> None:
    with pytest.warns(UserWarning, match=re.escape(why)):
        rematplan.plan_module(model, (torch.randn(4, 8),), budget="100%", costs="roofline")


class Hooked(nn.Module):
    """Registers a hook in its first forward, at a parameter, or in each, at a hidden tensor. That assigns or reads a
    buffer."""

    def __init__(self, kind: str) -> None:
        super().__init__()
        self.kind, self.done = kind, False
        self.first, self.last = nn.Linear(8, 8), nn.Sequential(nn.Linear(8, 32), nn.Tanh(), nn.Linear(32, 8))
        self.register_buffer("mean", torch.zeros(8))

    def forward(self, x: Tensor) -> Any:
        h = self.first(x)
        if self.kind == "a parameter" and not self.done:
            self.first.weight.register_hook(lambda gradient: gradient / 2)
            self.done = True
        if self.kind == "assigns":
            h.register_hook(self.watch)
        if self.kind == "reads":
            self.mean = 0.9 * self.mean + h.detach().mean(0)
            h.register_hook(lambda gradient: gradient * self.mean)
        return self.last(h.tanh())

    def watch(self, gradient: Tensor) -> None:
        self.mean = 0.9 * self.mean + gradient.mean(0)


HOOKED: dict[str, Callable[[], nn.Module]] = {
    "a hook that assigns a buffer": lambda: Hooked("assigns"),
    "a hook that reads a buffer which the forward assigned": lambda: Hooked("reads"),
    "a hook that stays at a parameter": lambda: Hooked("a parameter"),
}


@pytest.mark.parametrize("name", HOOKED)
def test_what_hooks_change_is_as_in_eager_mode(name: str) -> None:
    torch.manual_seed(0)
    model = HOOKED[name]()
    planned = rematplan.apply(copy.deepcopy(model), "200%", costs="roofline")
    for seed in range(3):
        for one in (model, planned):
            torch.manual_seed(seed)
            one.zero_grad()
            one(torch.randn(16, 8)).square().mean().backward()
        for (where, ours), theirs in zip(planned.named_parameters(), model.parameters(), strict=True):
            assert theirs.grad is not None, where
            assert ours.grad is not None, where
            assert torch.equal(ours.grad, theirs.grad), where
        for (where, ours), theirs in zip(planned.named_buffers(), model.buffers(), strict=True):
            assert torch.equal(ours, theirs), where


class Averaging(nn.Linear):
    """Averages its results in a buffer, whose ``.grad`` it asks for, as libraries of vector quantizers do."""

    def __init__(self) -> None:
        super().__init__(8, 8)
        self.register_buffer("mean", torch.zeros(8))

    def forward(self, x: Tensor) -> Tensor:
        y = super().forward(x)
        if self.mean.grad is None:
            self.mean.lerp_(y.detach().mean(0), 0.1)
        return y - self.mean


def test_a_buffer_has_no_gradient() -> None:
    model = Averaging()
    planned = rematplan.plan_module(
        copy.deepcopy(model), (torch.ones(4, 8),), budget="200%", costs="roofline"
    )
    for one in (model, planned):
        one(torch.ones(4, 8)).sum().backward()
    assert torch.equal(planned.mean, model.mean)
