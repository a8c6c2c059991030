"""Laws of forwards that return distributions: their tensors are results of the plan, with the bits of eager mode."""

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from same_bits import equal_after
from torch import Tensor, nn
from torch.distributions import (
    Categorical,
    Distribution,
    Independent,
    MixtureSameFamily,
    MultivariateNormal,
    Normal,
    kl_divergence,
)

import rematplan
from rematplan.ir import ModelError


def halves(h: Tensor) -> tuple[Tensor, Tensor]:
    a, b = h.chunk(2, -1)
    return a, b.exp()


KINDS: dict[str, Callable[[Tensor], Distribution]] = {
    "normal": lambda h: Normal(*halves(h)),
    "categorical": lambda h: Categorical(logits=h),
    "independent": lambda h: Independent(Normal(*halves(h)), 1),
    "mixture": lambda h: MixtureSameFamily(Categorical(logits=h[..., :4]), Normal(*halves(h))),
    "multivariate": lambda h: MultivariateNormal(h[:, :4], scale_tril=torch.diag_embed(h[:, 4:].exp())),
}


class Policy(nn.Module):
    def __init__(self, kind: Callable[[Tensor], Any]) -> None:
        super().__init__()
        self.body, self.kind = nn.Sequential(nn.Linear(6, 16), nn.Tanh(), nn.Linear(16, 8)), kind

    def forward(self, x: Tensor) -> dict[str, Any]:
        h = self.body(x)
        return {"policy": self.kind(h), "value": h.mean(-1)}


@pytest.mark.parametrize("kind", KINDS)
def test_distributions_are_returned_with_the_bits_of_eager_mode(kind: str) -> None:
    torch.manual_seed(0)
    plain, x = Policy(KINDS[kind]), torch.randn(12, 6)
    planned = rematplan.plan_module(
        copy.deepcopy(plain), (x,), budget="100%", strategy="approx_dp", costs="roofline"
    )

    def use(model: nn.Module) -> list[Tensor]:
        model.zero_grad()
        torch.manual_seed(1)
        given = model(x)
        policy = given["policy"]
        assert type(policy) is type(KINDS[kind](torch.randn(12, 8)))
        sample = policy.sample()
        (policy.log_prob(sample).mean() + given["value"].mean()).backward()
        if kind == "normal":
            assert bool((kl_divergence(policy, policy) == 0).all())
        return [sample, policy.log_prob(sample).detach()]

    for _ in range(2):
        equal_after(use, planned, plain)


class Own(Normal):
    """A user's distribution."""


def test_a_users_distribution_is_not_opened() -> None:
    model = rematplan.plan_module(
        Policy(lambda h: Own(*halves(h))), (torch.randn(12, 6),), budget="100%", costs="roofline"
    )
    with pytest.raises(ModelError, match="returns a Own, whose tensors PyTorch does not see"):
        model(torch.randn(12, 6))["policy"].sample()
