"""Laws of what a forward checks: a planned step checks it too, and raises the same."""

import math
from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional

import rematplan
from rematplan.ir import ModelError

X = torch.randn(6, 4, generator=torch.Generator().manual_seed(0))


class Checking(nn.Module):
    """Ends in a function that checks what it is given."""

    def __init__(self, end: Callable[[Tensor], Tensor]) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.linear, self.end = nn.Linear(4, 4, bias=False), end

    def forward(self, x: Tensor) -> Tensor:
        return self.end(torch.tanh(self.linear(x)))


def asserting(h: Tensor) -> Tensor:
    torch._assert_async(h.abs().max() > 0, "all is zero")
    torch._assert_async(h.isfinite().all())
    return h * 2


def conditional(h: Tensor) -> Tensor:
    result: Tensor = torch.cond(h.sum() > 0, torch.sin, torch.cos, (h,))
    return result


class SolvingBackward(torch.autograd.Function):
    """Checks in its backward."""

    @staticmethod
    def forward(ctx, h):
        ctx.save_for_backward(h)
        return h * 2

    @staticmethod
    def backward(ctx, gradient):
        (h,) = ctx.saved_tensors
        return torch.linalg.solve(h.mT @ h, gradient.mT).mT


CHECKING = {
    "inv": lambda h: torch.linalg.inv(h.mT @ h),
    "solve": lambda h: torch.linalg.solve(h.mT @ h, h.mT),
    "cholesky": lambda h: torch.linalg.cholesky(h.mT @ h),
    "assert": asserting,
}


def gradients_of(model: nn.Module) -> list[Tensor | None]:
    model.zero_grad()
    model(X).sum().backward()
    return [p.grad for p in model.parameters()]


@pytest.mark.parametrize("end", CHECKING.values(), ids=CHECKING)
def test_a_check_is_made_and_raises_what_eager_mode_raises(end: Callable[[Tensor], Tensor]) -> None:
    model = Checking(end)
    planned = rematplan.plan_module(model, (X,), budget="min", strategy="approx_dp", costs="roofline")
    assert all(map(torch.equal, gradients_of(model), gradients_of(planned)))
    with pytest.raises(RuntimeError) as expected:
        model(torch.zeros(6, 4))
    with pytest.raises(type(expected.value)) as raised:
        planned(torch.zeros(6, 4))
    assert str(raised.value) == str(expected.value)


def drawn(h: Tensor) -> Tensor:
    """With parameters and a sample that are checked, all of which depend on a weight."""
    normal = torch.distributions.Normal(h, h.exp() - 1e-3)
    sample = normal.rsample()
    return normal.log_prob(sample) + torch.distributions.Bernoulli(sample.sigmoid()).entropy()


def test_distributions_check_what_they_are_made_of(monkeypatch: pytest.MonkeyPatch) -> None:
    # torch.compile, used by any test before, turns it off for the whole process.
    monkeypatch.setattr(torch.distributions.Distribution, "_validate_args", True)
    model = Checking(drawn)
    planned = rematplan.plan_module(model, (X,), budget="min", strategy="approx_dp", costs="roofline")
    gradients = []
    for one in (model, planned):
        torch.manual_seed(0)
        gradients.append(gradients_of(one))
    assert all(map(torch.equal, *gradients))
    for one in (model, planned):
        with pytest.raises(ValueError, match=r"satisfy (the|its) constraint"):
            one(torch.full((6, 4), math.nan))


def positive(h: Tensor) -> Tensor:
    """Checked in two ways."""
    if h.isnan().any():
        raise ValueError("not a number")
    if h.min() > 0:
        return h * 2
    raise AssertionError("not positive")


def near(h: Tensor) -> Tensor:
    if torch.allclose(h, h.abs(), atol=1e-3) and torch.equal(h, h.detach()):
        return h * 2
    raise KeyError("far")


CONDITIONS = {
    "variances": lambda h: functional.gaussian_nll_loss(X.abs(), h, h),
    "assert": positive,
    "comparison": near,
}


@pytest.mark.parametrize("end", CONDITIONS.values(), ids=CONDITIONS)
def test_a_condition_that_is_only_checked_is_checked(end: Callable[[Tensor], Tensor]) -> None:
    model, x = Checking(end), X.abs()
    model.linear.weight.data.abs_()
    planned = rematplan.plan_module(model, (x,), budget="min", strategy="approx_dp", costs="roofline")
    gradients = []
    for one in (model, planned):
        model.zero_grad()
        one(x).sum().backward()
        gradients.append(model.linear.weight.grad)
    assert torch.equal(*gradients)
    for wrong in (-x, x * math.nan):
        given = []
        for one in (model, planned):
            try:
                given.append(str(one(wrong).sum().isnan()))
            except (ValueError, AssertionError, KeyError) as error:
                given.append(repr(error))
        assert given[0] == given[1]
    assert len(planned.plans) == 1


def halved(h: Tensor) -> Tensor:
    """Goes on for both outcomes of its first condition, for one of them to a check."""
    if h.sum() > 0:
        return h / 2
    if h.min() < 0:
        raise ValueError("negative")
    return h


def test_a_condition_for_both_of_whose_outcomes_the_forward_goes_on_has_no_plan() -> None:
    with pytest.warns(UserWarning, match="reads values of tensors"):
        rematplan.plan_module(Checking(halved), (torch.zeros(6, 4),), budget="100%", costs="roofline")


def test_a_step_whose_backward_checks_values_has_no_plan() -> None:
    with pytest.warns(UserWarning, match=r"takes functions.*it runs in eager mode"):
        rematplan.plan_module(Checking(SolvingBackward.apply), (X,), budget="100%", costs="roofline")


def test_a_condition_in_the_graph_whose_backward_cannot_be_measured_is_refused() -> None:
    torch._dynamo.trace_rules.clear_lru_cache()  # made anew, though not while ours stand in the places of functions
    with pytest.raises(ModelError, match="takes functions"):
        rematplan.plan_module(Checking(conditional), (X,), budget="100%", costs="roofline")


def test_the_backend_refuses_what_checks() -> None:
    torch._dynamo.reset()
    for end in (CHECKING["inv"], asserting):
        compiled = torch.compile(Checking(end), backend=rematplan.backend(budget="100%"))
        with pytest.raises(Exception, match="only checks values") as caught:
            compiled(X)
        assert isinstance(caught.value.inner_exception, ModelError)
