"""Kronecker statistics of layers that are split along rows: sums over parts, within the promised peak."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional

import rematplan
from rematplan.runtime.costs.measure import peak_above_entry


class Recurrent(nn.Module):
    """Uses its layers twice: the sums of both uses are one sum."""

    def __init__(self) -> None:
        super().__init__()
        self.mlp = nn.Sequential(nn.Linear(16, 128), nn.GELU(), nn.Linear(128, 16))

    def forward(self, x: Tensor) -> Tensor:
        for _ in range(2):
            x = x + self.mlp(x)
        return x.square().mean()


class Pixels(nn.Module):
    """Convolutions of single pixels, and one of windows before them."""

    def __init__(self) -> None:
        super().__init__()
        self.body, self.up, self.down = nn.Conv2d(3, 8, 3), nn.Conv2d(8, 64, 1), nn.Conv2d(64, 6, 1)

    def forward(self, x: Tensor) -> Tensor:
        return self.down(functional.silu(self.up(functional.silu(self.body(x))))).square().mean()


class Windows(nn.Module):
    """Convolutions of windows, which are split along the batch."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = nn.Conv2d(4, 64, 3, stride=2, groups=2), nn.Conv2d(64, 4, 3)

    def forward(self, x: Tensor) -> Tensor:
        return self.b(torch.tanh(self.a(x))).square().mean()


CASES: dict[str, tuple[type[nn.Module], tuple[int, ...], dict[str, int]]] = {
    "recurrent": (Recurrent, (8, 64, 16), {"mlp": 3}),
    "pixels": (Pixels, (4, 3, 18, 18), {"up": 4}),
    "windows": (Windows, (32, 4, 16, 16), {"a": 4}),
}


def measured(model: nn.Module, x: Tensor, **options: Any) -> tuple[rematplan.Statistics, int, int]:
    """The statistics of one step, its peak in bytes, and the promised one."""
    model = copy.deepcopy(model)
    planned = rematplan.plan_module(
        model, (x,), budget="min", strategy=rematplan.Anneal(moves=2000), refine=False, **options
    )
    planned(x).backward()
    model.zero_grad()
    peak, _ = peak_above_entry(lambda: planned(x).backward(), torch.device("cpu"))
    found = rematplan.planning(planned)
    return found.statistics(), peak + sum(t.nbytes for t in (x, *model.parameters())), found.plan.peak


@pytest.mark.parametrize(
    ("name", "more"),
    [
        ("recurrent", {}),
        ("recurrent", {"share": 0.5}),
        ("windows", {}),
        *(("pixels", more) for more in ({}, {"diagonal_above": 20}, {"approx": "reduce"})),
    ],
)
def test_they_are_sums_over_parts(name: str, more: dict[str, Any]) -> None:
    torch.manual_seed(0)
    kind, shape, split = CASES[name]
    model, x = kind().double(), torch.randn(shape, dtype=torch.float64)
    asked = {"statistics": rematplan.Kronecker(every=1, fisher="empirical", **more)}
    whole, _, promised = measured(model, x, **asked)
    parts, peak, less = measured(model, x, split=split, **asked)
    assert peak <= less < 0.95 * promised
    assert parts.skipped == whole.skipped
    for layer, factors in whole.factors.items():
        own = parts.factors[layer]
        assert (own.rows, own.samples) == (factors.rows, factors.samples)
        for one, other in ((own.a, factors.a), (own.g, factors.g)):
            assert (one - other).norm() <= 1e-14 * other.norm()
