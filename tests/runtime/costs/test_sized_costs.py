"""Between measured sizes calls are not measured again, and no workspace is ever estimated."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

from rematplan.plans import sized_costs as module
from rematplan.plans.sized_costs import SizedCosts
from rematplan.runtime.capture.capture import capture
from rematplan.runtime.costs.profile import profile_costs
from rematplan.runtime.costs.roofline import moved_bytes
from rematplan.runtime.graph.call_cost import CallCost
from rematplan.runtime.graph.captured_step import CapturedStep


class Block(nn.Module):
    """A layer with attention, a norm and a convolution; a loss."""

    def __init__(self) -> None:
        super().__init__()
        self.mix, self.out, self.norm = nn.Linear(16, 48), nn.Linear(16, 16), nn.LayerNorm(16)
        self.conv = nn.Conv1d(16, 16, 3, padding=1)

    def forward(self, x: Tensor) -> Tensor:
        """Its loss for x (batch, tokens, 16)."""
        q, k, v = self.mix(self.norm(x)).chunk(3, -1)
        y = self.out(nn.functional.scaled_dot_product_attention(q[:, None], k[:, None], v[:, None])[:, 0])
        return (self.conv(y.mT).relu() - x.mT).pow(2).mean()


def step_of(tokens: int, batch: int = 16, dtype: torch.dtype = torch.float32) -> CapturedStep:
    return capture(Block().to(dtype), (torch.randn(batch, tokens, 16, dtype=dtype),), "block")


@pytest.fixture
def measured(monkeypatch: pytest.MonkeyPatch) -> list[set[str]]:
    """Which calls each measurement measured. Times follow bytes; sums have a workspace."""
    made: list[set[str]] = []

    def measure(step, progress=None, cache=None, only=None):
        made.append(set(only))
        calls = [c for c in step.priced_calls if c.name in only]
        return {c.name: CallCost(2.0 * moved_bytes(step, c), 7 * ("sum" in str(c.target))) for c in calls}

    monkeypatch.setattr(module, "profile_costs", measure)
    return made


def test_between_two_sizes_only_what_may_need_a_workspace_is_measured(measured: list[set[str]]) -> None:
    known, steps = SizedCosts(), {tokens: step_of(tokens) for tokens in (20, 40, 60)}
    for tokens in (20, 60, 40, 40):
        costs = known.costs(steps[tokens])
        assert costs.keys() == {c.name for c in steps[tokens].priced_calls}
        for call in steps[tokens].priced_calls:
            assert costs[call.name].time == pytest.approx(2.0 * moved_bytes(steps[tokens], call))
            assert costs[call.name].workspace == 7 * ("sum" in str(call.target))
    unsure = {
        c.name
        for c in steps[40].priced_calls
        if any(word in str(c.target) for word in ("sum", "convolution", "attention"))
    }
    assert unsure < measured[0] == {c.name for c in steps[20].priced_calls}
    assert unsure <= measured[1]
    assert measured[2:] == [unsure, unsure]


@pytest.mark.parametrize("tokens", [19, 61])
def test_outside_of_the_measured_sizes_calls_are_measured(measured: list[set[str]], tokens: int) -> None:
    known = SizedCosts()
    for size in (20, 60, tokens):
        known.costs(step_of(size))
    assert measured[2] == measured[1]
    known.costs(step_of(tokens))
    assert len(measured[3]) < len(measured[2])


@pytest.mark.parametrize("other", [{"dtype": torch.float64}, {"batch": 1}])
def test_another_type_or_other_calls_know_nothing(measured: list[set[str]], other: dict[str, object]) -> None:
    known = SizedCosts()
    for size in (20, 60):
        known.costs(step_of(size))
    step = step_of(40, **other)
    known.costs(step)
    assert measured[2] == {c.name for c in step.priced_calls}


def test_a_result_in_a_larger_storage_is_measured_each_time(monkeypatch: pytest.MonkeyPatch) -> None:
    made: list[set[str]] = []

    def measure(step, progress=None, cache=None, only=None):
        made.append(set(only))
        return {
            c.name: CallCost(1.0, results=(10**9,) * len(c.results))
            for c in step.priced_calls
            if c.name in only
        }

    monkeypatch.setattr(module, "profile_costs", measure)
    known = SizedCosts()
    for size in (20, 60, 40):
        assert all(cost.results for cost in known.costs(step_of(size)).values())
    assert made[2] == made[0]


def test_what_is_kept_is_bounded_and_both_ends_stay(
    measured: list[set[str]], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "SIZES", 3)
    known = SizedCosts()
    for size in (10, 90, 20, 30, 40, 50):
        known.costs(step_of(size))
    assert [len(sizes) for sizes in known._known.values()] == [3]
    count = len(measured[-1])
    known.costs(step_of(80))
    assert len(measured[-1]) == count  # 10 and 90 are known still


def test_workspaces_are_those_of_a_measurement_of_each_size(tmp_path) -> None:
    known = SizedCosts()
    for tokens in (32, 96, 48, 64, 80):
        step = step_of(tokens)
        costs, true = known.costs(step), profile_costs(step, cache=tmp_path)
        assert {n: c.workspace for n, c in costs.items()} == {n: c.workspace for n, c in true.items()}
        assert {n: c.library for n, c in costs.items()} == {n: c.library for n, c in true.items()}
