"""Laws of what a model raises of itself: its own exception comes through a planned module as it is."""

import copy
import random
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional

import rematplan
from rematplan.ir import ModelError
from rematplan.runtime.costs.measure import peak_above_entry


class Careful(nn.Module):
    """Raises in each way that a forward may, as its argument and attributes say."""

    def __init__(self, fault: str = "") -> None:
        super().__init__()
        self.fault = fault
        self.linear, self.norm = nn.Linear(4, 4), nn.BatchNorm1d(4)
        self.embed = nn.Embedding(4, 4)
        self.register_buffer("calls", torch.tensor(0))

    def forward(self, x: Tensor, *, more: bool = False) -> Tensor:
        self.calls += 1
        y = functional.dropout(self.norm(self.linear(x)))
        if x.shape[0] == 3:
            raise ValueError(f"three rows,\nof {x.shape[1]}")
        if self.fault == "data" and x.sum() > 100:
            raise OverflowError("too large")
        if self.fault == "assert":
            raise AssertionError("three dimensions")
        if self.fault == "attribute":
            return self.nothing(y)
        if self.fault == "loss":
            return functional.cross_entropy(y, torch.zeros(x.shape[0] + 1, dtype=torch.int64))
        if self.fault == "tracing" and type(x) is not Tensor:
            raise RuntimeError("only plain tensors")
        return y


def planned(model: nn.Module, *args: Any) -> nn.Module:
    return rematplan.plan_module(model, args, budget="1GiB", strategy="store_all", costs="roofline")


def raised_by(call: Any) -> Exception:
    try:
        call()
    except Exception as error:
        return error
    raise AssertionError("nothing was raised")


@pytest.mark.parametrize("fault", ["data", "assert", "attribute", "loss"])
def test_an_error_of_the_model_is_raised_when_it_is_planned(fault: str) -> None:
    model, x = Careful(fault), torch.full((5, 4), 9.0)
    expected = raised_by(lambda: copy.deepcopy(model)(x))
    found = raised_by(lambda: planned(model, x))
    assert (type(found), str(found)) == (type(expected), str(expected))
    assert not isinstance(found, ModelError)


@pytest.mark.parametrize(
    "arguments",
    [
        ((torch.ones(3, 4),), {}),  # its own check
        ((torch.ones(5, 6),), {}),  # an op's
        ((torch.ones(1, 4),), {}),  # a layer's
        ((torch.ones(5, 4), 1), {}),
        ((torch.ones(5, 4),), {"less": True}),
        ((torch.ones(5, 4, dtype=torch.int64),), {}),
    ],
)
def test_an_error_of_the_model_is_raised_when_it_is_called(arguments: tuple[Any, Any]) -> None:
    args, kwargs = arguments
    model = Careful()
    expected = raised_by(lambda: copy.deepcopy(model)(*args, **kwargs))
    one = planned(model, torch.ones(5, 4))
    found = raised_by(lambda: one(*args, **kwargs))
    assert (type(found), str(found)) == (type(expected), str(expected))
    one(torch.ones(5, 4)).sum().backward()


def test_an_op_that_fails_while_a_step_runs_raises_its_error() -> None:
    one = planned(nn.Embedding(4, 4), torch.tensor([1]))
    with pytest.raises(IndexError, match="out of range"):
        one(torch.tensor([7]))


def test_an_error_of_the_tracer_alone_is_a_model_error() -> None:
    with pytest.warns(UserWarning, match="cannot be traced: RuntimeError: only plain tensors"):
        planned(Careful("tracing"), torch.ones(5, 4))


TABLES: dict[int, Tensor] = {}


class Remembering(nn.Module):
    """Keeps a table for each length."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 4)

    def forward(self, x: Tensor) -> Tensor:
        """Return features of the same shape, for x (length, 4)."""
        if len(x) not in TABLES:
            TABLES[len(x)] = torch.arange(len(x)).cos()
        y: Tensor = self.linear(x) * TABLES[len(x)][:, None]
        return y


def test_a_tensor_that_is_kept_outside_of_the_module_is_kept_by_a_plan_too() -> None:
    model, x = Remembering(), torch.randn(5, 4)
    ours = rematplan.plan_module(copy.deepcopy(model), (x,), budget="1GiB", costs="roofline")
    assert not TABLES
    for _ in range(3):
        assert torch.equal(ours(x), model(x))
    assert torch.equal(TABLES.pop(5), torch.arange(5).cos())
    assert len(ours.plans) == 2


def test_searching_for_the_model_s_error_changes_nothing() -> None:
    model = Careful("loss")
    before, state, python = copy.deepcopy(model.state_dict()), torch.get_rng_state(), random.getstate()
    x = torch.ones(5, 4)
    raised_by(lambda: planned(model, x))
    assert all(map(torch.equal, before.values(), model.state_dict().values()))
    assert torch.equal(torch.get_rng_state(), state)
    assert random.getstate() == python
    assert all(p.grad is None for p in model.parameters())


class Differentiating(nn.Module):
    """Has a backward in its forward, and goes by what that gives."""

    def __init__(self, most: float) -> None:
        super().__init__()
        self.most, self.linear = most, nn.Linear(4, 4)

    def forward(self, x: Tensor) -> Tensor:
        y = self.linear(x).tanh().square().sum()
        (slope,) = torch.autograd.grad(y, self.linear.weight, create_graph=True)
        if slope.abs().sum().item() > self.most:
            raise OverflowError("too steep")
        return y


def test_a_forward_that_differentiates_is_not_blamed() -> None:
    x = torch.randn(5, 4, generator=torch.Generator().manual_seed(0))
    with pytest.warns(UserWarning, match="reads values of tensors"):
        planned(Differentiating(1e9), x)
    with pytest.raises(OverflowError, match="too steep"):
        planned(Differentiating(0.0), x)


class Accumulating(nn.Module):
    """Adds to its own gradients in its forward, and decides by them."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 4)

    def forward(self, x: Tensor) -> Tensor:
        self.linear(x).sum().backward()
        if self.linear.weight.grad is not None and self.linear.weight.grad.abs().sum().item() > 0:
            raise OverflowError("too steep")
        return self.linear(x)


@pytest.mark.parametrize("with_gradients", [False, True])
def test_gradients_that_a_forward_adds_while_its_error_is_searched_for_are_removed(
    with_gradients: bool,
) -> None:
    model, x = Accumulating(), torch.ones(5, 4)
    if with_gradients:
        model.linear(x).sum().backward()
    before = [None if p.grad is None else p.grad.clone() for p in model.parameters()]
    with pytest.raises(OverflowError, match="too steep"):
        planned(model, x)
    for parameter, gradient in zip(model.parameters(), before, strict=True):
        assert (parameter.grad is None) == (gradient is None)
        assert gradient is None or torch.equal(parameter.grad, gradient)


class Flips(nn.Module):
    """Reads a flag that it changes, so that its forward is run in eager mode until the flag returns."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(64, 64) for _ in range(8))
        self.up = True

    def forward(self, x: Tensor) -> Tensor:
        self.up = not self.up
        for layer in self.layers:
            x = (layer(x) if self.up else layer(2 * x)).tanh()
        return x.sum()


class Penalised(Flips):
    """Also differentiates its first layer, which asks for what that saved."""

    def forward(self, x: Tensor) -> Tensor:
        first = self.layers[0](x).tanh().sum()
        (slope,) = torch.autograd.grad(first, self.layers[0].weight, create_graph=True)
        found: Tensor = super().forward(x)
        return found + slope.square().sum()


@pytest.mark.parametrize("kind", [Flips, Penalised])
def test_runs_of_a_forward_that_changes_state_keep_nothing_for_a_backward(kind: type[Flips]) -> None:
    model, x = kind(), torch.randn(256, 64)
    plain = copy.deepcopy(model)
    rematplan.apply(model, "70%", strategy="exact_dp", costs="roofline", refine=False)
    for _ in range(3):
        peak, _ = peak_above_entry(lambda: model(x).backward(), torch.device("cpu"))
        plain(x).backward()
        if kind is Flips:  # plain autograd keeps 16 tensors of 64 KiB
            assert peak < 13 * 2**16, peak
        for ours, theirs in zip(model.parameters(), plain.parameters(), strict=True):
            assert ours.grad is not None
            assert torch.equal(ours.grad, theirs.grad)
        model.zero_grad()
        plain.zero_grad()


class Jacobian(Careful):
    """Differentiates inside of its forward."""

    def forward(self, x: Tensor, *, more: bool = False) -> Tensor:
        slopes: Tensor = torch.func.vmap(torch.func.jacrev(self.linear))(x)
        return super().forward(x, more=more) + slopes.sum()


def test_a_forward_that_differentiates_has_no_error_of_its_own_because_it_is_watched() -> None:
    with pytest.warns(UserWarning, match="only plain tensors"):
        planned(Jacobian("tracing"), torch.randn(5, 4))
