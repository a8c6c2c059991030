"""A tensor that is changed in place keeps its strides in a planned step, and so do the bits of what reads it."""

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from same_bits import SETTINGS, same_grads
from torch import Tensor, nn

import rematplan

SIDE = 16
MASK = torch.rand(SIDE, SIDE, generator=torch.Generator().manual_seed(0)) > 0.5
ROWS = torch.arange(0, SIDE, 2)


def stored(h: Tensor) -> None:
    h[h > 1] = 0.0


CHANGES: dict[str, Callable[[Tensor], Any]] = {
    "masked_fill_": lambda h: h.masked_fill_(MASK, 0.0),
    "an item": stored,
    "tril_": lambda h: h.tril_(),
    "index_add_": lambda h: h.index_add_(2, ROWS, torch.ones(2, 6, len(ROWS), SIDE)),
    "scatter_": lambda h: h.scatter_(2, MASK.long().expand(2, 6, SIDE, SIDE), 2.0),
    "cumsum_": lambda h: h.cumsum_(2),
    "relu_": lambda h: h.relu_(),
}


class Changed(nn.Module):
    """Changes channels-last images between two convolutions."""

    def __init__(self, change: Callable[[Tensor], Any]) -> None:
        super().__init__()
        self.first, self.second, self.change = nn.Conv2d(3, 6, 3, padding=1), nn.Conv2d(6, 5, 3), change
        self.to(memory_format=torch.channels_last)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        h = self.first(x) * 2
        self.change(h)
        return h, self.second(h)


@pytest.mark.parametrize("how", CHANGES)
def test_channels_last_images_stay_so(how: str) -> None:
    torch.manual_seed(0)
    x = torch.randn(2, 3, SIDE, SIDE).to(memory_format=torch.channels_last)
    eager = Changed(CHANGES[how])
    planned = rematplan.apply(copy.deepcopy(eager), **SETTINGS)
    ours, theirs = planned(x), eager(x)
    for one, other in zip(ours, theirs, strict=True):
        assert one.stride() == other.stride()
        assert torch.equal(one, other)
    for found in (ours, theirs):
        found[1].square().sum().backward()
    assert same_grads(planned, eager)


class Scaled(nn.Module):
    """Returns channels-last images that it has scaled and changed."""

    def __init__(self, change: Callable[[Tensor], Any]) -> None:
        super().__init__()
        self.by, self.change = nn.Parameter(torch.ones(6, 1, 1)), change

    def forward(self, x: Tensor) -> Tensor:
        h = x * self.by
        self.change(h)
        return h


@pytest.mark.parametrize("how", CHANGES)
@pytest.mark.parametrize("order", [(0, 1, 2, 3), (0, 2, 1, 3), (3, 0, 1, 2)])
def test_a_gradient_of_any_layout_arrives_at_what_was_changed_as_in_eager_mode(
    how: str, order: tuple[int, ...]
) -> None:
    """PyTorch copies marks of a forward's node to the nodes of its backward, which write nothing in place."""
    made = torch.Generator().manual_seed(0)
    x = torch.randn(2, 6, SIDE, SIDE, generator=made).to(memory_format=torch.channels_last)
    arriving = torch.randn([x.shape[at] for at in order], generator=made)
    arriving = arriving.permute(torch.tensor(order).argsort().tolist())
    eager = Scaled(CHANGES[how])
    planned = rematplan.apply(copy.deepcopy(eager), **SETTINGS)
    for model in (planned, eager):
        model(x).backward(arriving)
    assert same_grads(planned, eager)


class Distances(nn.Module):
    """The backward of the distances changes a gradient in place that a factorisation has transposed."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(16, 16)

    def forward(self, x: Tensor) -> Tensor:
        h = self.inner(x)
        return torch.linalg.cholesky(torch.exp(-torch.cdist(h, h)) + torch.eye(len(h))).sum()


def test_a_gradient_that_a_formula_changes_in_place_keeps_its_strides() -> None:
    torch.manual_seed(0)
    eager, x = Distances(), torch.randn(32, 16)
    planned = rematplan.apply(copy.deepcopy(eager), **SETTINGS)
    for model in (eager, planned):
        model(x).backward()
    assert same_grads(planned, eager)


OTHER = torch.randn(2, 6, SIDE, SIDE, generator=torch.Generator().manual_seed(1))
FORMULAS: dict[str, Callable[[Tensor], Tensor]] = {
    "maximum": lambda h: torch.maximum(h, h.mean()),
    "minimum": lambda h: torch.minimum(h, OTHER.to(memory_format=torch.channels_last)),
    "clamp": lambda h: h.clamp(h.mean(), None),
    "fmax": lambda h: torch.fmax(h, h.mean()),
    "max": lambda h: h * h.max(),
    "median": lambda h: h - h.median(),
    "masked_select": lambda h: h * h.masked_select(MASK).mean(),
}


class Formula(nn.Module):
    """Computes what has a backward in place."""

    def __init__(self, change: Callable[[Tensor], Tensor]) -> None:
        super().__init__()
        self.scale, self.change = nn.Parameter(torch.tensor(2.0)), change

    def forward(self, x: Tensor) -> Tensor:
        return self.change(x * self.scale).square()


@pytest.mark.parametrize("how", FORMULAS)
def test_a_formula_that_is_in_place_in_eager_mode_keeps_strides(how: str) -> None:
    torch.manual_seed(0)
    x = torch.randn(2, 6, SIDE, SIDE).to(memory_format=torch.channels_last).requires_grad_()
    eager = Formula(FORMULAS[how])
    planned = rematplan.apply(copy.deepcopy(eager), **SETTINGS)
    found = [torch.autograd.grad(m(x).sum(), (x, m.scale)) for m in (eager, planned)]
    for one, other in zip(*found, strict=True):
        assert torch.equal(one, other)
        assert one.stride() == other.stride()
