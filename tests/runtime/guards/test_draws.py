"""Laws of forwards that decide by random numbers: each call has the bits of eager mode with the same seeds."""

import copy
from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn

import rematplan
from rematplan.ir import ModelError
from rematplan.module.verification import same_bits

X = torch.randn(16, 8, generator=torch.Generator().manual_seed(0))
Chance = Callable[["Layers", Tensor], Tensor]


class Layers(nn.Module):
    """Layers with dropout, of which a function of random numbers selects some."""

    def __init__(self, chance: Chance) -> None:
        super().__init__()
        self.layers, self.dropout = nn.ModuleList(nn.Linear(8, 8) for _ in range(3)), nn.Dropout(0.2)
        self.chance, self.rate, self.calls = chance, 0.5, 0

    def forward(self, x: Tensor) -> Tensor:
        self.calls += 1
        return self.chance(self, self.dropout(x)).sin()


def layer_drop(model: Layers, x: Tensor) -> Tensor:
    """A number is drawn before each layer, and dropout in each layer."""
    for layer in model.layers:
        if torch.rand([]) < model.rate:
            continue
        x = model.dropout(layer(x).tanh())
    return x


def drawn_ahead(model: Layers, x: Tensor) -> Tensor:
    """All numbers are drawn at once, in place."""
    kept = torch.empty(3).uniform_() > model.rate
    for layer, keep in zip(model.layers, kept, strict=True):
        x = layer(x).tanh() if keep else x
    return x + torch.rand(16, 8) * x.std()


def one_of(model: Layers, x: Tensor) -> Tensor:
    layer = model.layers[torch.randint(3, (1,)).item()]
    return layer(x).tanh() if torch.bernoulli(torch.full((2,), 0.5)).any() else torch.cat([layer(x), x])


def written(model: Layers, x: Tensor) -> Tensor:
    number = torch.rand(())
    number -= 0.5
    return x.tanh() @ model.layers[0].weight if number.abs() < 0.2 else model.layers[1](x)


def compared_with_an_input(model: Layers, x: Tensor) -> Tensor:
    drawn = torch.randn(4).normal_(0.1)
    x = model.layers[0](x)
    return x * 2 if torch.multinomial(drawn.exp(), 2)[0] > 1 else x.softmax(0)


CHANCES = (layer_drop, drawn_ahead, one_of, written, compared_with_an_input)


def trained(model: nn.Module, seed: int) -> list[Tensor]:
    torch.manual_seed(seed)
    model.zero_grad()
    y = model(X)
    y.sum().backward()
    grads = [torch.zeros(()) if p.grad is None else p.grad for p in model.parameters()]
    return [y.detach(), *grads, torch.get_rng_state()]


def planned_and_plain(chance: Chance, **options: str) -> tuple[nn.Module, nn.Module]:
    torch.manual_seed(0)
    plain = Layers(chance)
    how = {"budget": "1GiB", "costs": "roofline", "strategy": "store_all", **options}
    return rematplan.plan_module(copy.deepcopy(plain), (X,), **how), plain


@pytest.mark.parametrize("chance", CHANCES)
def test_each_outcome_of_a_draw_has_the_bits_of_eager_mode(chance: Chance) -> None:
    planned, plain = planned_and_plain(chance)
    for seed in (1, 2, 3, 4, 1, 2, 3, 4):
        assert all(map(same_bits, trained(planned, seed), trained(plain, seed)))
        assert planned.calls == plain.calls
    assert 2 <= len(planned.plans) <= 5


def test_the_making_of_a_plan_leaves_the_generator() -> None:
    torch.manual_seed(3)
    before = torch.get_rng_state()
    planned, plain = planned_and_plain(layer_drop)
    torch.set_rng_state(before)
    for seed in (1, 2):
        torch.manual_seed(seed)
        planned.prepare(X)
        assert torch.equal(torch.get_rng_state(), torch.Generator().manual_seed(seed).get_state())
        assert all(map(same_bits, trained(planned, seed), trained(plain, seed)))


def test_another_rate_is_another_decision() -> None:
    planned, plain = planned_and_plain(layer_drop)
    for rate in (0.0, 0.3, 0.5):
        planned.rate = plain.rate = rate
        assert all(map(same_bits, trained(planned, 1), trained(plain, 1)))


def test_evaluation_draws_nothing_and_needs_one_plan() -> None:
    planned, plain = planned_and_plain(
        lambda model, x: model.layers[model.training and torch.rand([]) < 0.5](x)
    )
    for model in (planned, plain):
        model.eval()
    known = len(planned.plans)
    for seed in (1, 2, 3):
        assert all(map(same_bits, trained(planned, seed), trained(plain, seed)))
    assert len(planned.plans) == known + 1


@pytest.mark.parametrize("strategy", ["chen_sqrt", "approx_dp", "exact_dp", "anneal", "auto"])
def test_every_strategy_makes_draws_that_nothing_reads(strategy: str) -> None:
    planned, plain = planned_and_plain(layer_drop, strategy=strategy, budget="8KiB")
    for seed in (1, 2, 3):
        assert all(map(same_bits, trained(planned, seed), trained(plain, seed)))


def as_python_number(model: Layers, x: Tensor) -> Tensor:
    return model.layers[0](x * torch.rand(1).item())


def by_a_list(model: Layers, x: Tensor) -> Tensor:
    return model.layers[0](x) * torch.rand(3).tolist()[0]


def after_a_draw_by_values(model: Layers, x: Tensor) -> Tensor:
    """How many numbers a Poisson distribution draws depends on its rates, here those of activations."""
    torch.poisson(model.layers[0](x).exp())
    return x if torch.rand([]) < 0.5 else model.layers[1](x)


GENERATOR = torch.Generator().manual_seed(0)


def by_another_generator(model: Layers, x: Tensor) -> Tensor:
    return model.layers[0](x) if torch.rand([], generator=GENERATOR) < 0.5 else model.layers[1](x)


@pytest.mark.parametrize("chance", [as_python_number, by_a_list, by_another_generator])
def test_numbers_that_never_return_or_are_not_known_have_no_plan(chance: Chance) -> None:
    with pytest.warns(UserWarning, match="reads values of tensors"):
        planned_and_plain(chance)


def test_an_outcome_without_gradients_is_refused_since_eager_mode_cannot_be_measured() -> None:
    with pytest.raises(ModelError, match="reads values of tensors"):
        planned_and_plain(after_a_draw_by_values)
