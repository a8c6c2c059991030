"""Laws of forwards that are another graph from call to call: by chance, by a counter, by a number, by what is routed.
They follow eager mode bit by bit, or are refused in one line whose advice works."""

import random
import re
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from same_bits import SETTINGS, X, equal_after, planned_and_plain
from torch import Tensor, nn

import rematplan
from rematplan.module.plan_access import runner_of
from rematplan.runtime.capture.flat_module import flattened_call
from rematplan.runtime.guards import call_key, open_key

LAYERS = 3


class Layer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.body = nn.Sequential(nn.LayerNorm(16), nn.Linear(16, 32), nn.Tanh(), nn.Linear(32, 16))

    def forward(self, x: Tensor) -> Tensor:
        return x + nn.functional.dropout(self.body(x), 0.1, self.training)


class LayerDrop(nn.Module):
    """Leaves layers out at random, as ``draw`` says, or those that the call says."""

    def __init__(self, draw: Callable[[], float] | None) -> None:
        super().__init__()
        self.draw, self.layers = draw, nn.ModuleList(Layer() for _ in range(LAYERS))

    def forward(self, x: Tensor, kept: tuple[bool, ...] | None = None) -> Tensor:
        for at, layer in enumerate(self.layers):
            if kept[at] if kept else bool(self.draw() >= 0.5):
                x = layer(x)
        return x


DRAWS: dict[str, tuple[Callable[[], Any], str]] = {
    "torch": (lambda: torch.rand([]), r"layers\.0, layers\.1, layers\.2"),
    "a number": (lambda: torch.empty(1).uniform_().item(), r"layers\.0, layers\.1, layers\.2"),
    "Python": (random.random, "before the call"),
    "NumPy": (np.random.uniform, "before the call"),
}


@pytest.mark.parametrize("key", [call_key, open_key])
def test_keys_distinguish_lazily_conjugated_and_negated_arguments(key: Callable[..., object]) -> None:
    given = torch.randn(3, dtype=torch.complex64)
    for plain, lazy in ((given, given.conj()), (given.imag, given.conj().imag)):
        assert key(*flattened_call((plain,), {})) != key(*flattened_call((lazy,), {}))


@pytest.mark.parametrize("by", ["Python", "NumPy"])
def test_layers_that_are_dropped_by_chance_are_planned_in_parts_and_the_advice_works(
    by: str, caplog: pytest.LogCaptureFixture
) -> None:
    draw, advice = DRAWS[by]
    states = random.getstate(), repr(np.random.get_state())
    with caplog.at_level("INFO", "rematplan"):
        made = rematplan.plan_module(LayerDrop(draw), (X,), **SETTINGS)
    assert re.search(f"planned in parts: .*{advice}.*as an argument", caplog.text)
    assert (random.getstate(), repr(np.random.get_state())) == states
    assert runner_of(made).parts is not None
    given, plain = planned_and_plain(LayerDrop(None), X, (True, False, True), budget=2**20)

    def by_argument(model: nn.Module) -> list[Tensor]:
        for kept in ((True, False, True), (False, True, False), (True, False, True)):
            model(X, kept).square().mean().backward()
        return []

    equal_after(by_argument, given, plain)
    assert len(given.plans) == 2


@pytest.mark.parametrize("by", DRAWS)
def test_layers_may_be_planned_one_by_one(by: str) -> None:
    torch.manual_seed(0)
    parts, plain = LayerDrop(DRAWS[by][0]), LayerDrop(DRAWS[by][0])
    plain.load_state_dict(parts.state_dict())
    for at, layer in enumerate(parts.layers):
        parts.layers[at] = rematplan.plan_module(layer, (X.clone().requires_grad_(),), **SETTINGS)

    def use(model: nn.Module) -> list[Tensor]:
        random.seed(3)
        np.random.seed(3)
        torch.manual_seed(3)
        model.zero_grad()
        for _ in range(6):
            (model(X) + sum(p.sum() for p in model.parameters())).square().mean().backward()
        return []

    equal_after(use, parts, plain)


class Counting(nn.Linear):
    """Counts its calls, and keeps a size for the next one; ``warm``: computes with the count."""

    def __init__(self, warm: bool) -> None:
        super().__init__(16, 16)
        self.warm, self.calls, self.longest = warm, 0, 0

    def forward(self, x: Tensor) -> Tensor:
        self.calls += 1
        self.longest = max(self.longest, len(x))
        return super().forward(x) * (1 + self.calls / 10 if self.warm else 1)


def test_a_counter_that_is_computed_with_has_no_plan() -> None:
    with pytest.warns(UserWarning, match=r"changes 0\.calls.* and computes with it.*make it a buffer"):
        rematplan.plan_module(nn.Sequential(Counting(True)), (X,), **SETTINGS)


def test_a_counter_that_only_counts_is_counted_on() -> None:
    planned, plain = planned_and_plain(Counting(False))
    equal_after(lambda model: [model(X).square().mean().backward() for _ in "abc"] and [], planned, plain)
    assert (planned.calls, planned.longest) == (plain.calls, plain.longest) == (3, 8)
    assert len(planned.plans) == 2  # for the two lengths that it knows


class CountingInABuffer(nn.Linear):
    def __init__(self) -> None:
        super().__init__(16, 16)
        self.register_buffer("calls", torch.zeros((), dtype=torch.long))

    def forward(self, x: Tensor) -> Tensor:
        self.calls += 1
        y = super().forward(x) * (1 + self.calls / 10)
        return y.tanh() if self.calls > 2 else y


def test_a_counter_in_a_buffer_is_followed() -> None:
    planned, plain = planned_and_plain(CountingInABuffer(), budget=2**20)
    equal_after(lambda model: [model(X).square().mean().backward() for _ in "abcd"] and [], planned, plain)
    assert len(planned.plans) == 2


class Timed(nn.Module):
    """Embeds a time step, as networks for diffusion do: a number, or a tensor."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(16, 32), nn.SiLU(), nn.Linear(32, 16))

    def forward(self, x: Tensor, t: int | Tensor) -> Tensor:
        t = t if isinstance(t, Tensor) else torch.tensor([t])
        angles = t.float()[:, None] * torch.exp(-torch.arange(8) / 2)
        return x + self.layers(x + torch.cat([angles.sin(), angles.cos()], -1))


def test_a_number_costs_a_plan_each_but_one_search_and_a_tensor_one_plan() -> None:
    for of in (int, lambda t: torch.tensor([t])):
        planned, plain = planned_and_plain(Timed(), X, of(1))
        equal_after(
            lambda model, of=of: [model(X, of(t)).square().mean().backward() for t in (1, 2, 3)] and [],
            planned,
            plain,
        )
        assert len(planned.plans) == (3 if of is int else 1)
        assert len({p.schedule for p in planned.plans}) == 1


class Routed(nn.Module):
    """A mixture of experts, each of which gets the rows that the gate sends it."""

    def __init__(self) -> None:
        super().__init__()
        self.gate, self.experts = nn.Linear(16, 3), nn.ModuleList(Layer() for _ in range(3))

    def forward(self, x: Tensor) -> Tensor:
        weights, chosen = self.gate(x).softmax(-1).max(-1)
        out = torch.zeros_like(x)
        for at, expert in enumerate(self.experts):
            (rows,) = torch.where(chosen == at)
            out = out.index_add(0, rows, expert(x[rows]) * weights[rows, None])
        return out


class RoutedByMasks(Routed):
    """The same where each expert sees all rows: one graph, whatever the gate says."""

    def forward(self, x: Tensor) -> Tensor:
        weights, chosen = self.gate(x).softmax(-1).max(-1)
        parts = (e(x) * (weights * (chosen == at))[:, None] for at, e in enumerate(self.experts))
        return torch.stack([*parts]).sum(0)


def test_routing_by_values_is_planned_in_parts_and_by_masks_whole() -> None:
    routed = rematplan.plan_module(Routed(), (X,), **SETTINGS)
    assert runner_of(routed).parts is not None
    planned, plain = planned_and_plain(RoutedByMasks())
    equal_after(
        lambda model: [model(x).square().mean().backward() for x in (X, -X, 2 * X)] and [], planned, plain
    )
    assert len(planned.plans) == 1
