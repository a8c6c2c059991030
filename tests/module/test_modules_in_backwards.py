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
from rematplan.ir import ModelError


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


@pytest.mark.parametrize(
    ("model", "why"),
    [
        (Net(function=Adding), "a backward of it calls backward()"),
        (Freeing(), "it frees or changes the memory"),
    ],
)
def test_what_reversible_networks_do_with_gradients_and_memory_is_refused(model: nn.Module, why: str) -> None:
    with pytest.raises(ModelError, match=re.escape(why)):
        rematplan.plan_module(model, (torch.randn(4, 8),), budget="100%", costs="roofline")
