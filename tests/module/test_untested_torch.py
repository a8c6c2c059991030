"""Laws of the check that an untested version of PyTorch gets: one comparison with eager mode, then silence."""

import warnings

import pytest
import torch
from torch import nn

from rematplan import plan_module
from rematplan.ir import ModelError
from rematplan.module import untested_torch
from rematplan.runtime.graph import compat

X = torch.randn(4, 6, generator=torch.Generator().manual_seed(0))


@pytest.fixture(autouse=True)
def untested(monkeypatch: pytest.MonkeyPatch) -> None:
    """A process whose version is not among the tested ones, and that has not planned anything yet."""
    monkeypatch.setattr(untested_torch, "is_tested", lambda version: False)
    monkeypatch.setattr(untested_torch, "_checked", set())


def network() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(6, 5), nn.BatchNorm1d(5), nn.Dropout(0.5), nn.Linear(5, 3))


def planned(model: nn.Module) -> nn.Module:
    return plan_module(model, (X,), budget="100%", strategy="store_all", costs="roofline")


@pytest.mark.parametrize(
    ("version", "tested"), [("2.13.0+cpu", True), ("2.15.1", True), ("2.16.0", False), ("3.0.0a0", False)]
)
def test_versions_are_told_apart_by_their_first_two_numbers(version: str, tested: bool) -> None:
    assert compat.is_tested(version) is tested


def test_the_first_plan_is_compared_and_warned_of_once() -> None:
    with pytest.warns(
        UserWarning, match="was not tested with torch .* compared with eager mode and is equal"
    ):
        planned(network())
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        planned(network())


def test_the_comparison_leaves_the_model_and_the_random_state_alone() -> None:
    model, before = network(), torch.get_rng_state()
    state = {name: value.clone() for name, value in model.state_dict().items()}
    torch.set_rng_state(before)
    with pytest.warns(UserWarning, match="not tested"):
        planned(model)
    assert torch.equal(torch.get_rng_state(), before)
    assert all(p.grad is None for p in model.parameters())
    assert all(torch.equal(value, state[name]) for name, value in model.state_dict().items())


def test_a_gradient_that_differs_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    results = untested_torch._results
    calls = []

    def wrong(model: nn.Module, *arguments: object) -> dict[str, torch.Tensor]:
        calls.append(model)
        found = results(model, *arguments)
        if len(calls) == 2:  # the planned step
            found["the gradient of 0.weight"] = found["the gradient of 0.weight"] + 1e-6
        return found

    monkeypatch.setattr(untested_torch, "_results", wrong)
    with pytest.raises(ModelError, match=r"differs from eager mode in the gradient of 0\.weight"):
        planned(network())


def test_a_model_that_differs_from_itself_is_not_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    results = untested_torch._results
    calls = []

    def unsteady(model: nn.Module, *arguments: object) -> dict[str, torch.Tensor]:
        calls.append(model)
        return {name: t + len(calls) for name, t in results(model, *arguments).items()}

    monkeypatch.setattr(untested_torch, "_results", unsteady)
    with pytest.warns(UserWarning, match="not tested"):
        planned(network())


def test_too_little_memory_is_a_warning(monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*_: object) -> dict[str, torch.Tensor]:
        raise torch.OutOfMemoryError("no room")

    monkeypatch.setattr(untested_torch, "_results", full)
    with pytest.warns(UserWarning, match="memory is too short to compare"):
        planned(network())
