"""Laws of copies: those that a trace makes of writes in place go, those that change type or layout stay, and the bits
are those of eager mode."""

import copy
from collections.abc import Callable

import pytest
import torch
from same_bits import equal_after
from torch import Tensor, nn

import rematplan
from rematplan.module.captures import capture_call
from rematplan.runtime.capture.plain_copies import COPY


def slices(h: Tensor, _x: Tensor) -> Tensor:
    h[:, :8].mul_(0.5).add_(1)
    h[:, 8:].mul_(3)
    h[::2] = h[::2].clone().sin()
    return h


def whole(h: Tensor, x: Tensor) -> Tensor:
    made = torch.empty_like(h)
    made.copy_(h * 2)
    other = torch.zeros_like(x)
    other.copy_(x)
    return made.tanh_() + other


def converted(h: Tensor, x: Tensor) -> Tensor:
    wide = torch.empty(h.shape, dtype=torch.float64)
    wide.copy_(h)
    wide[:, :4] = h[:, 4:8] + x[:, :4]
    return (wide.sin() * wide).float()


def turned(h: Tensor, x: Tensor) -> Tensor:
    made = torch.empty(h.shape[::-1]).t()
    made.copy_(h.sin())
    row = torch.empty_like(x)
    row.copy_(x[0])  # expanded
    return (made * row).cumsum(1)


def given(h: Tensor, x: Tensor) -> Tensor:
    made = torch.empty_like(x)
    made.copy_(x)
    return made, h * made


BODIES: dict[str, tuple[Callable[[Tensor, Tensor], Tensor], int]] = {
    "slices": (slices, 0),
    "whole": (whole, 0),
    "converted": (converted, 2),
    "turned": (turned, 2),
    "given": (given, 0),
}
"""By name, code that writes in place, and how many copies of its forward must stay."""


class Writes(nn.Module):
    def __init__(self, name: str) -> None:
        super().__init__()
        self.linear, self.body = nn.Linear(16, 16), BODIES[name][0]
        self.register_buffer("last", torch.zeros(6, 16))

    def forward(self, x: Tensor) -> list[Tensor]:
        with torch.no_grad():
            self.last.copy_(x)
        results = self.body(self.linear(x), x)
        return [results] if isinstance(results, Tensor) else list(results)


@pytest.mark.parametrize("name", BODIES)
def test_writes_in_place_have_the_bits_of_eager_mode_and_no_needless_copies(name: str) -> None:
    torch.manual_seed(0)
    model, x = Writes(name), torch.randn(6, 16)
    step = capture_call(model, (x,), {})[1]
    assert sum(call.target is COPY and not call.backward for call in step.calls) == BODIES[name][1]
    planned = rematplan.plan_module(
        copy.deepcopy(model), (x,), budget="1GiB", strategy="store_all", costs="roofline"
    )

    def use(one: nn.Module) -> list[Tensor]:
        results = one(x)
        one.linear.weight.grad = one.linear.bias.grad = None
        sum(r.square().sum() for r in results).backward()
        return results

    equal_after(use, planned, model)
    results = planned(x)
    assert all(r.data_ptr() != t.data_ptr() for r in results for t in (x, planned.last))
