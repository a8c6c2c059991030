"""Laws of buffers that a forward replaces by new tensors: the old tensor, which other code may have, stays as it is, as
in eager mode."""

import copy

import pytest
import torch
from same_bits import SETTINGS, X
from torch import Tensor, nn

import rematplan


class Average(nn.Module):
    """Replaces a buffer whose first tensor it keeps, as rotary embeddings keep their first frequencies."""

    mean: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(16, 16)
        self.register_buffer("mean", torch.ones(16))
        self.first = self.mean

    def forward(self, x: Tensor) -> Tensor:
        h = self.linear(x)
        self.mean = 0.5 * self.mean + h.detach().mean(0)
        return h * self.mean + self.first


class Growing(Average):
    """Makes its buffer anew from the first one for each longer batch, as dynamic rotary embeddings do."""

    longest = 4

    def forward(self, x: Tensor) -> Tensor:
        if len(x) > self.longest:
            self.longest = len(x)
            self.register_buffer("mean", self.first * 4 / len(x))
        return self.linear(x) * self.mean


@pytest.mark.parametrize("kind", [Average, Growing])
@pytest.mark.parametrize("how", ["in place", "plan_module"])
def test_the_tensor_that_a_forward_replaces_stays_as_it_is(kind: type[Average], how: str) -> None:
    eager = kind()
    ours, rows = copy.deepcopy(eager), (4, 8, 8, 6, 12, 4)
    options = {**SETTINGS, "budget": "1MiB"}
    planned = (
        rematplan.apply(ours, **options)
        if how == "in place"
        else rematplan.plan_module(ours, (X[:4],), **options)
    )
    for count in rows:
        earlier, was = planned.mean, planned.mean.clone()
        for one in (eager, planned):
            one.zero_grad()
            one(X[:1].repeat(count, 1) + torch.arange(count)[:, None]).square().mean().backward()
        assert torch.equal(earlier, was)
        assert torch.equal(planned.first, torch.ones(16))
        assert torch.equal(eager.mean, planned.mean)
        assert torch.equal(eager.linear.weight.grad, planned.linear.weight.grad)
