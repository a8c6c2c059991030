"""Laws of models with modules that `torch.compile` has compiled: a planned step computes them as eager mode does."""

import copy
import warnings

import numpy as np
import pytest
import torch
from torch import Tensor, nn

import rematplan
from rematplan.module.plan_access import with_runner
from rematplan.module.verification import same_bits

X = torch.randn(64, 16, generator=torch.Generator().manual_seed(0))


def block() -> nn.Module:
    return nn.Sequential(nn.Linear(16, 64), nn.GELU(), nn.Linear(64, 16))


class Blocks(nn.Module):
    """Has blocks that are compiled by a wrapper. Draws of NumPy leave some out if ``dropping``."""

    def __init__(self, dropping: bool) -> None:
        super().__init__()
        wrapped = (torch.compile(block(), backend="eager") for _ in range(2))
        self.blocks, self.last, self.dropping = nn.ModuleList(wrapped), block(), dropping

    def forward(self, x: Tensor) -> Tensor:
        for one in self.blocks:
            if not self.dropping or np.random.rand() > 0.3:
                x = x + one(x)
        return self.last(x)


@pytest.mark.parametrize("in_parts", [False, True])
def test_a_planned_step_has_the_bits_of_eager_mode(in_parts: bool) -> None:
    torch.manual_seed(0)
    plain = Blocks(dropping=in_parts)
    planned = copy.deepcopy(plain)
    for model in (plain, planned):
        model.last.compile(backend="eager")
    rematplan.apply(planned, "200%", costs="roofline", refine=False)
    gradients = []
    for model in (plain, planned):
        np.random.seed(1)
        with warnings.catch_warnings(record=True) as told:
            warnings.simplefilter("always")
            for _ in range(3):
                model(X).square().mean().backward()
        gradients.append([p.grad for p in model.parameters()])
    assert all(map(same_bits, *gradients))
    text = "compiled modules, blocks.0, blocks.1, last: a planned step computes them as eager mode does"
    assert any(text in str(one.message) for one in told)
    assert (with_runner(planned)._rematplan.parts is not None) == in_parts  # type: ignore[attr-defined]
