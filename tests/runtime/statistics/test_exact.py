"""Laws of statistics: they are what the definition says, under any plan, and leave all else as it was."""

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from statistics_models import MODELS
from statistics_reference import error, expected, expected_of_calls
from torch import Tensor, nn

import rematplan
from rematplan.runtime.statistics.factors import Statistics

SETTINGS: dict[str, Any] = {"strategy": "approx_dp", "costs": "roofline"}
pytestmark = pytest.mark.usefixtures("double")
EXACT = 1e-12


def made(name: str) -> tuple[nn.Module, Tensor]:
    return MODELS[name]()


def loss_of(reduction: str) -> Callable[[Tensor], Tensor]:
    """A loss whose terms are the rows of the last dimension."""

    def loss(y: Tensor) -> Tensor:
        terms = (y.cos() * torch.arange(1.0, y.shape[-1] + 1)).logsumexp(-1)
        return terms.mean() if reduction == "mean" else terms.sum()

    return loss


def step(model: nn.Module, x: Tensor, loss: Callable[[Tensor], Tensor]) -> None:
    torch.manual_seed(3)
    loss(model(x)).backward()


def check(found: Statistics, wanted: dict[str, Any], terms: int) -> None:
    assert set(found.factors) == set(wanted)
    for name, one in wanted.items():
        factors = found.factors[name]
        assert error(factors.a, one.a) <= EXACT, name
        assert error(factors.g, one.g) <= EXACT, name
        assert (factors.rows, factors.samples) == (one.rows, terms)


@pytest.mark.parametrize(
    ("name", "approx", "reduction"),
    [
        *(
            (name, *each)
            for name in ("mlp", "cnn", "gpt")
            for each in (("expand", "mean"), ("reduce", "sum"))
        ),
        ("lines", "expand", "mean"),
        ("volumes", "reduce", "mean"),
    ],
)
def test_factors_are_exact_under_any_plan(name: str, approx: str, reduction: str) -> None:
    model, x = made(name)
    loss = loss_of(reduction)
    terms, scale = counts(model, x, reduction)
    plain = copy.deepcopy(model)
    wanted = expected(plain, lambda m: step(m, x, loss), approx == "reduce", scale)
    options = rematplan.Kronecker(fisher="empirical", approx=approx, loss_reduction=reduction)
    reruns = exact_at_all_budgets(model, plain, x, loss, options, wanted, terms)
    assert reruns > 0 or name in ("lines", "volumes")


@pytest.mark.parametrize("reduction", ["mean", "sum"])
def test_factors_of_packed_projections_are_exact_under_any_plan(
    reduction: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    model, x = made("attention")
    loss = loss_of(reduction)
    terms, scale = counts(model, x, reduction)
    wanted = expected_of_calls(copy.deepcopy(model), lambda m: step(m, x, loss), scale, monkeypatch)
    plain = copy.deepcopy(model)
    step(plain, x, loss)
    options = rematplan.Kronecker(fisher="empirical", loss_reduction=reduction)
    assert exact_at_all_budgets(model, plain, x, loss, options, wanted, terms) > 0


def counts(model: nn.Module, x: Tensor, reduction: str) -> tuple[int, int]:
    """The number of the loss's terms, and what turns gradients of the loss into those of their sum."""
    y = model(x)
    terms = y.numel() // y.shape[-1]
    return terms, terms if reduction == "mean" else 1


def exact_at_all_budgets(
    model: nn.Module,
    plain: nn.Module,
    x: Tensor,
    loss: Callable[[Tensor], Tensor],
    options: rematplan.Kronecker,
    wanted: dict[str, Any],
    terms: int,
) -> int:
    """Compare the factors with those wanted, and gradients and buffers with the plain model's, under plans without
    recomputation, at the least peak and at the mean of both; return the number of re-runs.
    """
    reruns, peaks = 0, []
    for budget in ("1GiB", "min", None):
        own = copy.deepcopy(model)
        budget = budget or sum(peaks) // 2
        planned = rematplan.plan_module(own, (x,), budget=budget, **SETTINGS, statistics=options)
        peaks.append(rematplan.planning(planned).plan.peak)
        step(planned, x, loss)
        check(rematplan.planning(planned).statistics(), wanted, terms)
        for parameter, other in zip(own.parameters(), plain.parameters(), strict=True):
            assert torch.equal(parameter.grad, other.grad)
        for buffer, other in zip(own.buffers(), plain.buffers(), strict=True):
            assert torch.equal(buffer, other)
        schedule = rematplan.planning(planned).plan.schedule
        runs = [one.op for one in schedule if hasattr(one, "op")]
        reruns += len(runs) - len(set(runs))
        assert not any(runs.count(op) > 1 for op in runs if op.startswith("statistic_"))
    assert peaks[1] <= peaks[2] <= peaks[0]
    return reruns
