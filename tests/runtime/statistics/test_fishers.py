"""The kinds of Fisher matrix: labels that the model draws, the exact Hessian of the loss, the user's own loss."""

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from statistics_models import MODELS
from statistics_reference import error, expected
from torch import Tensor, nn
from torch.nn import functional

import rematplan
from rematplan.ir import InfeasibleBudget, ModelError
from rematplan.runtime.costs import profile
from rematplan.runtime.statistics.factors import Statistics
from rematplan.runtime.statistics.fisher_output_gradients import Draws

pytestmark = pytest.mark.usefixtures("double")
SETTINGS: dict[str, Any] = {"strategy": "approx_dp", "costs": "roofline"}


def taken(
    model: nn.Module, x: Tensor, budget: str | int = "min", **options: Any
) -> tuple[nn.Module, Statistics]:
    """A step of a copy with some loss, and its statistics."""
    model = copy.deepcopy(model)
    planned = rematplan.plan_module(
        model, (x,), budget=budget, **SETTINGS, statistics=rematplan.Kronecker(**options)
    )
    torch.manual_seed(3)
    planned(x).square().mean().backward()
    return model, rematplan.planning(planned).statistics()


def labelled(labels: Callable[[Tensor], Tensor]) -> Callable[[nn.Module, Tensor], Tensor]:
    """The sum of cross entropies with labels that are made of the logits."""

    def loss(model: nn.Module, x: Tensor) -> Tensor:
        torch.manual_seed(3)
        y = model(x)
        flat = y.reshape(-1, y.shape[-1])
        return functional.cross_entropy(flat, labels(flat.detach()), reduction="sum")

    return loss


def drawn(logits: Tensor) -> Tensor:
    generator = Draws(0).next(logits.device)
    return torch.multinomial(logits.softmax(-1), 1, generator=generator)[:, 0]


@pytest.mark.parametrize(("name", "approx"), [("mlp", "expand"), ("cnn", "reduce"), ("gpt", "expand")])
def test_mc_takes_labels_of_the_model(name: str, approx: str) -> None:
    model, x = MODELS[name]()
    loss = labelled(drawn)
    plain = copy.deepcopy(model)
    wanted = expected(plain, lambda m: loss(m, x).backward(), approx == "reduce")
    _, found = taken(model, x, approx=approx)
    assert set(found.factors) == set(wanted)
    for weight, one in wanted.items():
        assert error(found.factors[weight].a, one.a) < 1e-12
        assert error(found.factors[weight].g, one.g) < 1e-12
        assert found.factors[weight].rows == one.rows


@pytest.mark.parametrize("fisher", ["mc", "type-2"])
def test_a_backward_for_statistics_changes_no_gradient_nor_random_state(fisher: str) -> None:
    model = nn.Sequential(nn.Linear(6, 9), nn.Dropout(0.3), nn.Tanh(), nn.Linear(9, 4))
    x = torch.randn(50, 6)
    plain, states = copy.deepcopy(model), []
    torch.manual_seed(3)
    plain(x).square().mean().backward()
    states.append(torch.get_rng_state())
    planned, _ = taken(model, x, fisher=fisher)
    states.append(torch.get_rng_state())
    for one, other in zip(planned.parameters(), plain.parameters(), strict=True):
        assert torch.equal(one.grad, other.grad)
    assert torch.equal(*states)


def test_a_backward_for_statistics_makes_no_gradients_of_weights() -> None:
    model, x = MODELS["cnn"]()
    planned = rematplan.plan_module(model, (x,), budget="1GiB", **SETTINGS, statistics=rematplan.Kronecker())
    planned(x).sum().backward()
    lines = rematplan.planning(planned).source.split("def backward_0")[1].splitlines()
    made = [line for line in lines if "_mc0" in line.split(" = ")[0] and " = " in line]
    convolutions = [line for line in made if "= aten_convolution_backward" in line]
    assert len(convolutions) == 4  # not the first's, whose input wants no gradient
    assert all(line.endswith("[True, False, False])") for line in convolutions)
    assert not any("sum_dim" in line for line in made)


def test_labels_are_others_in_each_step_and_the_same_when_training_resumes(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Also if the costs are measured again for the second step, which has gradients of the first."""
    monkeypatch.setattr(profile, "_AGREE", 0.0)  # as on a busy machine: no costs are cached
    model, x = nn.Linear(6, 4), torch.randn(50, 6)
    measured = SETTINGS | {"costs": "profile"}
    planned = rematplan.plan_module(model, (x,), budget="1GiB", **measured, statistics=rematplan.Kronecker())
    planning = rematplan.planning(planned)
    assert planning.statistics_state == (0, 0)

    def one() -> Tensor:
        planning.take_statistics(True)
        planned(x).sum().backward()
        return planning.statistics().factors["weight"].g

    first, state, second = one(), planning.statistics_state, one()
    assert not torch.equal(first, second)
    planning.statistics_state = state
    assert torch.equal(one(), second)


def test_the_mean_of_drawn_labels_is_the_exact_hessian() -> None:
    model, x = nn.Linear(3, 4), torch.randn(20_000, 3)
    _, mc = taken(model, x, fisher="mc")
    _, exact = taken(model, x, fisher="type-2")
    p = model(x).softmax(-1).detach()
    assert error(exact.factors["weight"].g, torch.diag(p.sum(0)) - p.T @ p) < 1e-12
    assert error(mc.factors["weight"].g, exact.factors["weight"].g) < 0.03


def test_type_2_is_the_expectation_over_all_labels() -> None:
    model, x = MODELS["cnn"]()
    wanted: dict[str, Tensor] = {}
    p = copy.deepcopy(model)(x).softmax(-1).detach()
    for label in range(p.shape[1]):
        # Each sample's gradient is weighted by the root of its label's probability.
        def backward(m: nn.Module, label: int = label) -> None:
            logits = m(x)
            losses = functional.cross_entropy(logits, torch.full((len(x),), label), reduction="none")
            (losses * p[:, label].sqrt()).sum().backward()

        for name, one in expected(copy.deepcopy(model), backward, reduce=False).items():
            wanted[name] = wanted.get(name, 0) + one.g
    _, found = taken(model, x, fisher="type-2")
    assert set(found.factors) == set(wanted)
    for name, g in wanted.items():
        assert error(found.factors[name].g, g) < 1e-12


def test_gaussian_outputs() -> None:
    model, x = nn.Linear(3, 4), torch.randn(50, 3)
    for reduction, weight in (("mean", 1 / 4), ("sum", 1.0)):
        options = {"likelihood": "gaussian", "loss_reduction": reduction}
        _, exact = taken(model, x, fisher="type-2", **options)
        own = exact.factors["weight"]
        assert error(own.g, 2 * weight * 50 * torch.eye(4)) < 1e-13
        # The Hessian of a mean squared error in the weight is G ⊗ A.
        one = model.weight[0].detach().clone().requires_grad_()

        def loss(row: Tensor, reduction: str = reduction) -> Tensor:
            whole = torch.cat([row[None], model.weight[1:].detach()])
            return functional.mse_loss(functional.linear(x, whole), torch.zeros(50, 4), reduction=reduction)

        hessian = torch.autograd.functional.hessian(loss, one)
        mean = reduction == "mean"
        scale = own.g[0, 0] / (own.samples if mean else 1) / own.rows
        assert error(scale * own.a[:-1, :-1], hessian) < 1e-12
    _, mc = taken(model, torch.randn(20_000, 3), likelihood="gaussian", loss_reduction="sum")
    assert error(mc.factors["weight"].g / 20_000, 2 * torch.eye(4)) < 0.05


class WithLoss(nn.Module):
    """As models of other libraries: the loss and the logits."""

    def __init__(self) -> None:
        super().__init__()
        self.body, self.head = nn.Linear(6, 9), nn.Linear(9, 4)

    def forward(self, x: Tensor, labels: Tensor) -> tuple[Tensor, Tensor]:
        logits = self.head(self.body(x).tanh())
        return functional.cross_entropy(logits, labels), logits


def test_a_loss_inside_of_the_model() -> None:
    model, x, labels = WithLoss(), torch.randn(30, 6), torch.randint(0, 4, (30,))
    inner = nn.Sequential(model.body, nn.Tanh(), model.head)
    for options, make in (({"output": 1}, drawn), ({"fisher": "empirical"}, lambda _: labels)):
        own = copy.deepcopy(model)
        planned = rematplan.plan_module(
            own, (x, labels), budget="min", **SETTINGS, statistics=rematplan.Kronecker(**options)
        )
        loss, _ = planned(x, labels)
        loss.backward()
        found = rematplan.planning(planned).statistics()
        wanted = expected(copy.deepcopy(inner), lambda m, make=make: labelled(make)(m, x).backward(), False)
        for name, one in zip(("body.weight", "head.weight"), wanted.values(), strict=True):
            assert found.factors[name].samples == 30
            assert error(found.factors[name].a, one.a) < 1e-12
            assert error(found.factors[name].g, one.g) < 1e-12
        model.zero_grad()
        model(x, labels)[0].backward()
        for one, other in zip(own.parameters(), model.parameters(), strict=True):
            assert torch.equal(one.grad, other.grad)


def test_an_output_without_the_dimension_of_classes_is_refused() -> None:
    """Also where labels are not drawn, and the dimension only counts the terms of the loss."""
    vector = nn.Sequential(nn.Linear(4, 1), nn.Flatten(0))
    for fisher in ("mc", "empirical"):
        with pytest.raises(
            ModelError, match=r"the shape \[3\], without a dimension of classes \(class_dim=1\)"
        ):
            rematplan.plan_module(
                copy.deepcopy(vector),
                (torch.randn(3, 4),),
                budget="1GiB",
                **SETTINGS,
                statistics=rematplan.Kronecker(fisher=fisher, class_dim=1),
            )


def test_an_output_of_which_no_labels_can_be_drawn_is_refused() -> None:
    with pytest.raises(ModelError, match="state output=, or use fisher='empirical'"):
        rematplan.plan_module(
            WithLoss(),
            (torch.randn(3, 6), torch.zeros(3, dtype=torch.long)),
            budget="1GiB",
            **SETTINGS,
            statistics=rematplan.Kronecker(),
        )
    for model, x, why in (
        (nn.Linear(4, 100), torch.randn(3, 4), "100 classes"),
        (nn.Linear(4, 1), torch.randn(3, 4), "one class, so labels carry no information"),
        (nn.Linear(4, 5), torch.randn(3, 2, 4), "one loss term per sample"),
    ):
        with pytest.raises(ModelError, match=why):
            taken(model, x, fisher="type-2")


@pytest.mark.parametrize("fisher", ["mc", "empirical", "type-2"])
def test_a_budget_below_what_statistics_need_is_refused_with_the_least(fisher: str) -> None:
    model, x = MODELS["mlp"]()
    with pytest.raises(InfeasibleBudget) as refused:
        taken(model, x, budget=10_000, fisher=fisher)
    assert refused.value.smallest > 10_000
