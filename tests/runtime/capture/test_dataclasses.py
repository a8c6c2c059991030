"""Laws of dataclasses: their tensors are arguments and results of the plan, with the bits of eager mode."""

import copy
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any

import torch
from same_bits import equal_after
from torch import Tensor, nn

import rematplan


@dataclass
class Batch:
    x: Tensor
    weight: Tensor | None = None
    seen: list[str] = field(default_factory=list)

    @property
    def twice(self) -> Tensor:
        return 2 * self.x


@dataclass(frozen=True)
class Features:
    layers: tuple[Tensor, ...]
    name: str = "features"


@dataclass
class Found:
    value: Tensor
    features: Features
    batch: Batch
    means: SimpleNamespace

    def loss(self) -> Tensor:
        return self.value.square().mean() + sum(
            (t.mean() for t in self.features.layers), self.means.last.sum()
        )


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(6, 6) for _ in range(3))

    def forward(self, batch: Batch) -> Found:
        h, made = batch.twice, []
        for layer in self.layers:
            h = torch.tanh(layer(h))
            made.append(h)
        batch.seen.append(str(len(made)))
        if batch.weight is not None:
            batch.weight = h.detach().mean(1)
        return Found(h, Features(tuple(made[:2])), batch, SimpleNamespace(last=h.exp().mean(1).sum()[None]))


def use(model: nn.Module, weighted: bool) -> list[Tensor]:
    model.zero_grad()
    batch = Batch(torch.linspace(-1, 1, 24).view(4, 6), torch.ones(4) if weighted else None)
    found = model(batch)
    assert (type(found), type(found.features), found.features.name) == (Found, Features, "features")
    assert batch.seen == ["3"]
    found.loss().backward()
    left = [batch.weight] if batch.weight is not None else []
    return [found.value.detach(), *(t.detach() for t in found.features.layers), *left]


def test_dataclasses_are_taken_and_returned_with_the_bits_of_eager_mode() -> None:
    torch.manual_seed(0)
    plain = Net()
    options: dict[str, Any] = {"strategy": "approx_dp", "costs": "roofline", "refine": False}
    planned = rematplan.plan_module(copy.deepcopy(plain), (Batch(torch.ones(4, 6)),), budget="min", **options)
    for weighted in (False, True, False):
        equal_after(lambda model, given=weighted: use(model, given), planned, plain)
    assert rematplan.planning(planned).stats().captures == 2
