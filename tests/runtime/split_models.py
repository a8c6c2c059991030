"""Small networks with ops that can be split along rows, and their steps."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from functools import cache
from typing import Any

import torch
from planned_steps import PlannedStep, problem
from torch import Tensor, nn
from torch.nn import functional

from rematplan.module.captures import capture_call
from rematplan.planner.strategies.store_all import no_recompute
from rematplan.runtime.graph.call_cost import CallCost
from rematplan.runtime.graph.captured_step import CapturedStep
from rematplan.runtime.split.regions import SplitRegion, find_regions
from rematplan.runtime.split.split_step import split_regions, splittable
from rematplan.runtime.split.sums_in_place import with_sums_in_place

WIDTH, VOCABULARY = 16, 200


class Decoder(nn.Module):
    """A block with an MLP, and a head whose weight is the embedding's, with a cross entropy."""

    def __init__(self, tied: bool = True, drops: float = 0.0, **loss: Any) -> None:
        super().__init__()
        self.token = nn.Embedding(VOCABULARY, WIDTH)
        self.norm = nn.LayerNorm(WIDTH)
        self.mlp = nn.Sequential(
            nn.Linear(WIDTH, 8 * WIDTH), nn.GELU(), nn.Dropout(drops), nn.Linear(8 * WIDTH, WIDTH)
        )
        self.head = nn.Linear(WIDTH, VOCABULARY, bias=False)
        if tied:
            self.head.weight = self.token.weight
        self.loss = loss

    def forward(self, tokens: Tensor, targets: Tensor) -> Tensor:
        x = self.token(tokens)
        x = x + self.mlp(self.norm(x))
        scores = self.head(x)
        return functional.cross_entropy(scores.flatten(0, 1), targets.flatten(), **self.loss)


class Shifted(Decoder):
    """A decoder that drops the scores of each sequence's last token, so that tokens are no axis, but sequences are."""

    def forward(self, tokens: Tensor, targets: Tensor) -> Tensor:
        x = self.token(tokens)
        scores = self.head(x + self.mlp(self.norm(x)))[:, :-1].reshape(-1, VOCABULARY)
        return functional.cross_entropy(scores, targets[:, 1:].flatten(), **self.loss)


class PerPixel(nn.Module):
    """A head of convolutions of pixels, with a cross entropy for each pixel."""

    def __init__(self) -> None:
        super().__init__()
        self.stem, self.head = nn.Conv2d(3, 4, 3, padding=1), nn.Conv2d(4, 40, 1)

    def forward(self, x: Tensor, targets: Tensor) -> Tensor:
        return functional.cross_entropy(self.head(self.stem(x).relu()), targets)


def tokens(batch: int, length: int) -> tuple[Tensor, Tensor]:
    targets = torch.randint(VOCABULARY, (batch, length))
    if targets.numel():
        targets[-1, length // 2 :] = 0
    return torch.randint(VOCABULARY, (batch, length)), targets


Case = Callable[[], tuple[nn.Module, tuple[Tensor, ...]]]
CASES: dict[str, Case] = {
    "tied": lambda: (Decoder(), tokens(2, 64)),
    "untied": lambda: (Decoder(tied=False), tokens(1, 128)),
    "ignored": lambda: (Decoder(ignore_index=0), tokens(2, 64)),
    "smoothed": lambda: (Decoder(label_smoothing=0.1, ignore_index=0), tokens(2, 64)),
    "summed": lambda: (Decoder(reduction="sum"), tokens(2, 64)),
    "weighted classes": lambda: (Decoder(weight=torch.rand(VOCABULARY) + 0.1), tokens(2, 64)),
    "odd": lambda: (Decoder(), tokens(3, 37)),
    "shifted": lambda: (Shifted(tied=False), tokens(4, 33)),
    "pixels": lambda: (PerPixel(), (torch.randn(2, 3, 16, 16), torch.randint(40, (2, 16, 16)))),
}


class Elements(nn.Module):
    """A wide head whose loss is a mean or sum over elements. ``loss``: of outputs and targets."""

    def __init__(self, loss: Callable[[Tensor, Tensor], Tensor]) -> None:
        super().__init__()
        self.stem, self.head = nn.Linear(8, WIDTH), nn.Linear(WIDTH, VOCABULARY)
        self.loss_of = loss

    def forward(self, x: Tensor, targets: Tensor) -> Tensor:
        return self.loss_of(self.head(self.stem(x).relu()), targets)


def elements(loss: Callable[[Tensor, Tensor], Tensor]) -> Case:
    return lambda: (Elements(loss), (torch.randn(3, 48, 8), torch.rand(3, 48, VOCABULARY)))


LOSSES: dict[str, Case] = {
    "squares": elements(functional.mse_loss),
    "sum of squares": elements(lambda y, t: functional.mse_loss(y, t, reduction="sum")),
    "huber": elements(lambda y, t: functional.huber_loss(y, t, delta=0.3)),
    "smooth": elements(lambda y, t: functional.smooth_l1_loss(y, t, beta=0.3)),
    "logits": elements(
        lambda y, t: functional.binary_cross_entropy_with_logits(y, t, pos_weight=t.new_full((), 2))
    ),
    "probabilities": elements(lambda y, t: functional.binary_cross_entropy(y.sigmoid(), t)),
    "divergence": elements(
        lambda y, t: functional.kl_div(y.log_softmax(-1), t.softmax(-1), reduction="batchmean")
    ),
    "token weights": elements(
        lambda y, t: -(y.log_softmax(-1).gather(-1, t[..., :1].long()) * t[..., 1:2]).sum() / t[..., 1].sum()
    ),
    "focal": elements(lambda y, t: ((1 - y.sigmoid()) ** 2 * (y - t).abs()).mean()),
}
"""Losses that are sums over parts."""


def captured(module: nn.Module, batch: tuple[Tensor, ...]) -> tuple[CapturedStep, tuple[SplitRegion, ...]]:
    step = capture_call(module, batch, {})[1]
    return step, splittable(step, find_regions(step))


@cache
def case(name: str) -> tuple[nn.Module, tuple[Tensor, ...], CapturedStep, tuple[SplitRegion, ...]]:
    """A network of `CASES` or `LOSSES` with its batch, its step and its regions, captured once for all tests of a file:
    they change gradients only."""
    torch.manual_seed(0)
    module, batch = (CASES | LOSSES)[name]()
    return module, batch, *captured(module, batch)


def split(step: CapturedStep, regions: Iterable[SplitRegion], parts: int) -> CapturedStep:
    """The step with regions in so many parts, and sums in place, as it is planned."""
    return with_sums_in_place(split_regions(step, dict.fromkeys(regions, parts)))


def planned(module: nn.Module, step: CapturedStep) -> PlannedStep:
    free = {c.name: CallCost(1.0) for c in step.priced_calls}
    return PlannedStep(module, step, no_recompute(problem(step, free)).schedule)


def split_weights(step: CapturedStep, regions: tuple[SplitRegion, ...]) -> set[str]:
    """The names of the gradients that are sums over parts, those of biases and scales included."""
    sums = {v for r in regions for v, s in r.states.items() if s == "sum"}
    storages = {step.values[v].storage for v in sums}
    for call in step.calls:  # a gradient to which another is added
        if not storages.isdisjoint(step.reads(call)):
            storages |= set(step.writes(call))
    return {
        f"gradient {o.target.removeprefix('model.')}"
        for o in step.outputs
        if step.values[o.value].storage in storages
    }
