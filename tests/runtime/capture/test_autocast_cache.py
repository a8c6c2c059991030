"""Under autocast a planned step has eager mode's bits: weights are cast once for all uses, backwards are not cast."""

import copy
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional

import rematplan

AUTOCAST: dict[str, Callable[[], AbstractContextManager[object]]] = {
    "none": nullcontext,
    "cached": lambda: torch.autocast("cpu", torch.bfloat16),
    "not cached": lambda: torch.autocast("cpu", torch.bfloat16, cache_enabled=False),
}


class Shared(nn.Linear):
    """Uses its weight twice in one block of autocast, then in another, and casts it by itself beside."""

    def __init__(self, within: Callable[[], AbstractContextManager[object]]) -> None:
        super().__init__(13, 13)
        self.within = within

    def forward(self, x: Tensor) -> Tensor:
        with self.within():
            y = super().forward(super().forward(x).tanh())
        with self.within():
            y = y + super().forward(y.tanh())
        with torch.autocast("cpu", enabled=False):
            y = y + functional.linear(x.bfloat16(), self.weight.to(torch.bfloat16))
        return y + x.bfloat16() @ self.weight.to(torch.bfloat16)


@pytest.mark.parametrize(
    ("within", "around"),
    [("none", "cached"), ("cached", "none"), ("not cached", "cached"), ("cached", "not cached")],
)
def test_a_weight_is_cast_as_often_as_in_eager_mode(within: str, around: str) -> None:
    torch.manual_seed(0)
    plain, x = Shared(AUTOCAST[within]), torch.randn(15, 13, requires_grad=True)
    planned = copy.deepcopy(plain)
    with AUTOCAST[around]():
        planned = rematplan.plan_module(planned, (x,), budget="100%", strategy="store_all", costs="roofline")
    gradients = []
    for model in (planned, plain):
        x.grad = None
        with AUTOCAST[around]():
            y = model(x)
        y.float().square().mean().backward()
        gradients.append([x.grad, model.weight.grad, model.bias.grad])
    assert len(rematplan.planning(planned).plans) == 1
    assert all(map(torch.equal, *gradients))


class Exact(nn.Linear):
    """Multiplies in 32 bits amid autocast."""

    def forward(self, x: Tensor) -> Tensor:
        y = super().forward(x)
        with torch.autocast("cpu", enabled=False):
            return functional.linear(y.float().tanh(), self.weight)


def test_a_backward_is_not_under_autocast() -> None:
    torch.manual_seed(0)
    plain, x = Exact(13, 13), torch.randn(15, 13)
    gradients = []
    with torch.autocast("cpu", torch.bfloat16):
        planned = rematplan.plan_module(
            copy.deepcopy(plain), (x,), budget="100%", strategy="store_all", costs="roofline"
        )
    for model in (planned, plain):
        with torch.autocast("cpu", torch.bfloat16):
            y = model(x)
        y.square().mean().backward()
        gradients.append([model.weight.grad, model.bias.grad])
    assert all(map(torch.equal, *gradients))


class Heads(nn.Module):
    """Uses its input and a layer twice."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(13, 13) for _ in range(2))

    def forward(self, x: Tensor) -> Tensor:
        return x + self.layers[1](self.layers[0](x) * self.layers[1](x))


def test_only_leaves_are_cast_once() -> None:
    torch.manual_seed(0)
    plain, x = Heads(), torch.randn(15, 13)
    planned = rematplan.apply(copy.deepcopy(plain), "100%", strategy="store_all", costs="roofline")
    for nodes in (False, True, False):
        gradients = []
        for model in (planned, plain):
            start = {"x": x.clone(), **{n: p.detach().clone() for n, p in model.named_parameters()}}
            given = {name: t.requires_grad_() for name, t in start.items()}
            if nodes:
                given = {name: 1.0 * t for name, t in start.items()}
            rows = given.pop("x")
            with AUTOCAST["cached"]():
                y = torch.func.functional_call(model, given, (rows,))
            y.float().square().mean().backward()
            gradients.append([t.grad for t in start.values()])
        assert all(map(torch.equal, *gradients))
    assert len(rematplan.planning(planned).plans) == 2
