"""Laws of forwards that test activations for infinite and NaN values: each call has the bits of eager mode."""

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import rematplan
from rematplan.module.verification import same_bits

X = torch.randn(8, 4, generator=torch.Generator().manual_seed(0))
Clamp = Callable[[Tensor], Tensor]


def by_is_finite(h: Tensor) -> Tensor:
    return h if torch.isfinite(h).all() else h.nan_to_num().clamp(-9, 9)


def by_two_tests(h: Tensor) -> Tensor:
    return h.nan_to_num().clamp(-9, 9) if torch.isinf(h).any() or h.isnan().any() else h


def by_comparisons(h: Tensor) -> Tensor:
    return h if not ((h != h) | (h.abs() == float("inf"))).any() else h.nan_to_num() / 3


def by_a_count(h: Tensor) -> Tensor:
    return h.nan_to_num() * 2 if (~h.isfinite()).sum() > 0 else h


def by_one_number(h: Tensor) -> Tensor:
    return h if h.sum().isfinite().item() else h.nan_to_num() * h.nan_to_num().sigmoid()


def by_halved_numbers(h: Tensor) -> Tensor:
    scale = torch.isfinite(h).float() * 0.5
    h = h * (scale + 0.5)
    return h if torch.logical_and(scale, torch.isfinite(h)).all() else h.nan_to_num()


class Clamping(nn.Module):
    """Clamps each layer's result if it is not finite. It also draws, and has a buffer and an attribute that change."""

    def __init__(self, clamp: Clamp, layers: int = 2) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(4, 4) for _ in range(layers))
        self.clamp, self.dropout, self.norm, self.seen = clamp, nn.Dropout(0.2), nn.BatchNorm1d(4), 0

    def forward(self, x: Tensor) -> Tensor:
        self.seen += 1
        x = self.norm(x)
        for layer in self.layers:
            x = self.clamp(self.dropout(layer(x)))
        return x.tanh()


def trained(model: nn.Module, x: Tensor) -> list[Any]:
    torch.manual_seed(0)
    model.zero_grad()
    model(x).sum().backward()
    return [*(p.grad for p in model.parameters()), *model.buffers(), torch.get_rng_state()]


@pytest.mark.parametrize(
    "clamp", [by_is_finite, by_two_tests, by_comparisons, by_a_count, by_one_number, by_halved_numbers]
)
def test_values_that_are_not_finite_have_the_bits_of_eager_mode(clamp: Clamp) -> None:
    torch.manual_seed(0)
    plain = Clamping(clamp)
    planned = rematplan.plan_module(copy.deepcopy(plain), (X,), budget="1GiB", costs="roofline")
    weight = plain.layers[1].weight.detach().clone()
    for scale in (1.0, 1.0, torch.inf, 1.0, torch.inf, torch.nan):
        for model in (planned, plain):
            model.layers[1].weight.data.copy_(weight * scale)
        assert all(map(same_bits, trained(planned, X), trained(plain, X)))
        assert planned.seen == plain.seen
    # `by_two_tests` distinguishes infinite from NaN values.
    assert 2 <= len(planned.plans) <= 3


def test_another_shape_has_other_outcomes() -> None:
    torch.manual_seed(0)
    plain = Clamping(by_is_finite, layers=3)
    planned = rematplan.plan_module(copy.deepcopy(plain), (X,), budget="1GiB", costs="roofline")
    for rows, layer, scale in (
        (8, 0, 1.0),
        (6, 0, 1.0),
        (6, 2, torch.inf),
        (5, 2, torch.inf),
        (8, 0, torch.inf),
    ):
        given = []
        for model in (planned, plain):
            kept = model.layers[layer].weight.detach().clone()
            model.layers[layer].weight.data.mul_(scale)
            given.append(trained(model, X[:rows]))
            model.layers[layer].weight.data.copy_(kept)
        assert all(map(same_bits, *given))


def raising(h: Tensor) -> Tensor:
    if torch.isnan(h).any():
        raise ValueError("not a number")
    return h


def test_a_test_for_nan_that_raises_raises_in_a_plan() -> None:
    planned = rematplan.plan_module(Clamping(raising), (X,), budget="1GiB", costs="roofline")
    for _ in range(2):
        with pytest.raises(ValueError, match="not a number"):
            planned(X * torch.nan)
    planned(X).sum().backward()
    assert (len(planned.plans), planned.seen) == (1, 1)


class Inner(nn.Module):
    """Tests the arguments, whose values are known before the step."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 4)

    def forward(self, x: Tensor) -> Tensor:
        return self.linear(x if torch.isfinite(x).all() else x.nan_to_num()).tanh()


def test_a_test_of_the_arguments_selects_the_plan_before_the_step() -> None:
    plain = Inner()
    planned = rematplan.plan_module(copy.deepcopy(plain), (X,), budget="1GiB", costs="roofline")
    for x in (X, X * torch.nan, X):
        assert all(map(same_bits, trained(planned, x), trained(plain, x)))
    assert len(planned.plans) == 2
    assert "check_outcome" not in planned.source
