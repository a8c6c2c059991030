"""Ops whose formulas eager mode chooses by values have its bits in a planned step, whatever the values."""

import copy
from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional

import rematplan
from rematplan.module.verification import same_bits

SHAPE = (6, 5, 13)


class Body(nn.Module):
    """Calls a body with the scaled input, classes and ones with a few zeros among them."""

    def __init__(self, body: "Callable[[Tensor, Body], Tensor]") -> None:
        super().__init__()
        self.body = body
        self.scale, self.fill = nn.Parameter(torch.randn(SHAPE)), nn.Parameter(torch.tensor(0.3))
        ones = torch.ones(SHAPE)
        ones[1, 2, 3] = ones[1, 3, 3] = ones[4, 4, 7] = 0
        self.register_buffer("ones", ones)
        self.register_buffer("classes", torch.randint(0, 5, (6, 13)))
        self.register_buffer("weights", torch.rand(5))

    def forward(self, x: Tensor) -> Tensor:
        return self.body(x * self.scale, self)


BODIES: dict[str, Callable[[Tensor, Body], Tensor]] = {
    "product": lambda x, m: x[0, :2].prod() * x.prod(1, keepdim=True),
    "of rows": lambda x, m: x.transpose(0, 2).prod(-1),
    "of doubles": lambda x, m: x.prod(1, dtype=torch.float64),
    "with zeros": lambda x, m: (x * m.ones).prod(1),
    "with a zero": lambda x, m: (x * m.ones)[4, 3:].prod(),
    "with zeros in all": lambda x, m: -(x * m.ones).prod(),
    "filled with a parameter": lambda x, m: x.masked_fill(x > 0, m.fill),
    "smoothed classes": lambda x, m: functional.cross_entropy(
        x, m.classes, m.weights, ignore_index=2, label_smoothing=0.1
    ),
}


@pytest.mark.parametrize("name", BODIES)
def test_bits_are_eager_mode_s(name: str) -> None:
    torch.manual_seed(1)
    plain, x = Body(BODIES[name]), torch.randn(SHAPE)
    planned = rematplan.plan_module(
        copy.deepcopy(plain), (x,), budget="min", strategy="approx_dp", costs="roofline"
    )
    results = []
    for model in (planned, plain):
        y = model(x)
        y.sin().sum().backward()
        results.append([y.detach(), *(p.grad for p in model.parameters() if p.grad is not None)])
    assert all(map(same_bits, *results))
