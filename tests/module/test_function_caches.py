"""Laws of forwards that call functions with a cache: a trace leaves nothing in it, and bits are those of eager mode."""

import copy
import functools

import pytest
import torch
from torch import Tensor, nn

import rematplan
from rematplan.module.verification import same_bits

HOW = {"budget": "1GiB", "costs": "roofline", "strategy": "store_all"}


def made(refused: bool = False) -> nn.Module:
    """Return a model whose functions have caches that are made now (the collector does not list what is frozen)."""

    @functools.lru_cache(maxsize=4)
    def grid(rows: int) -> tuple[Tensor, ...]:
        return (torch.linspace(0, 1, rows)[:, None],)

    class Grid(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.linear = nn.Linear(8, 8)

        @functools.cache  # noqa: B019
        def frequencies(self, width: int) -> Tensor:
            return torch.arange(width).float().cos()

        def forward(self, x: Tensor) -> Tensor:
            y: Tensor = (
                self.linear(x).tanh() * grid(len(x))[0].to(x) * self.frequencies(x.shape[1]).to(x.dtype)
            )
            return y.sum() if refused and float(y.sum()) > 0 else y.square().sum()

    return Grid()


def test_functions_with_a_cache_are_planned() -> None:
    plain = made()
    planned = rematplan.plan_module(copy.deepcopy(plain), (torch.randn(4, 8),), **HOW)
    for rows in (4, 6, 4):
        x = torch.randn(rows, 8)
        for model in (planned, plain):
            model.zero_grad()
            model(x).backward()
        assert all(map(same_bits, *([p.grad for p in m.parameters()] for m in (planned, plain))))


def test_a_refusal_leaves_no_traced_tensor_in_a_cache() -> None:
    model = made(refused=True)
    with pytest.warns(UserWarning, match="reads values of tensors"):
        rematplan.plan_module(model, (torch.randn(5, 8),), **HOW)
    model(torch.randn(5, 8)).backward()
