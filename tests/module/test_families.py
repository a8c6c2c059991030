"""A planned module called in many sizes: every size begins with a plan of the family and is polished, at equal bits and
within the budget."""

from __future__ import annotations

import copy
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import rematplan
from rematplan.ir.problem_json import problem_to_json
from rematplan.planner.annealing.polish import polished
from rematplan.planner.auto.auto_strategy import Auto
from rematplan.planner.caches.plan_store import PlanStore
from rematplan.planner.core.plan import Plan, plan_from_json
from rematplan.planner.core.schedule import runs_of
from rematplan.planner.search_job import SearchJob
from rematplan.plans import refining


class Layers(nn.Module):
    """Layers with attention, norms and dropout; a loss."""

    def __init__(self, depth: int = 4) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.norms = nn.ModuleList(nn.LayerNorm(32) for _ in range(depth))
        self.wide = nn.ModuleList(nn.Linear(32, 96) for _ in range(depth))
        self.back = nn.ModuleList(nn.Linear(32, 32) for _ in range(depth))

    def forward(self, x: Tensor) -> Tensor:
        """Its loss for x (batch, tokens, 32)."""
        for norm, wide, back in zip(self.norms, self.wide, self.back, strict=True):
            q, k, v = wide(norm(x)).chunk(3, -1)
            mixed = torch.softmax(q @ k.mT / 6, -1) @ v
            x = x + nn.functional.dropout(back(mixed).tanh(), 0.1)
        return x.pow(2).mean()


class InThisProcess:
    """Stands for the background process: it makes the short searches at once, and no longer ones."""

    def submit(self, problem: Any, budget: int, strategy: str, options: Any, starts: Any, heard: Any) -> bool:
        """See `BackgroundSearch.submit`."""
        runs = [runs_of(plan.schedule) for plan in starts]
        request = {"problem": problem_to_json(problem), "budget": budget, "starts": runs}
        job = SearchJob({**request, "strategy": strategy, "options": options}, PlanStore())
        for answer in job.polish():
            heard(plan_from_json(answer["plan"], problem), False)
        heard(None, True)
        return True


def batch(tokens: int) -> Tensor:
    return torch.randn(4, tokens, 32, generator=torch.Generator().manual_seed(tokens))


def gradients(model: nn.Module, x: Tensor) -> list[Tensor]:
    torch.manual_seed(1)
    model(x).backward()
    found = [p.grad.clone() for p in model.parameters() if p.grad is not None]
    model.zero_grad()
    return found


@pytest.fixture
def brief(monkeypatch: pytest.MonkeyPatch) -> None:
    """Searches that end soon, without plans on disk."""
    monkeypatch.setattr(refining, "shared", InThisProcess)
    monkeypatch.setattr("rematplan.planner.search_job.polished", partial(polished, moves=20_000))
    monkeypatch.setattr(PlanStore, "saved", lambda self, problem: ())
    monkeypatch.setattr(PlanStore, "solved", lambda self, *_: None)


@pytest.mark.usefixtures("brief")
def test_sizes_below_the_first_are_never_searched_and_have_the_bits_of_eager_mode(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    eager = Layers()
    model = rematplan.plan_module(
        copy.deepcopy(eager),
        (batch(64),),
        budget="55% of activations",
        costs="roofline",
        loss_memory=0,
        strategy=rematplan.Auto(time_limit=2.0),
    )

    def no_search(*_: Any, **__: Any) -> Plan:
        raise AssertionError("the family has a plan that fits")

    monkeypatch.setattr(Auto, "plan", no_search)
    for tokens in (64, 56, 40, 60, 48, 56, 52):
        x = batch(tokens)
        for _ in range(2):
            assert all(map(torch.equal, gradients(model, x), gradients(eager, x)))
            assert model.plan.peak <= model.plan.budget == model.plans[0].budget
    stats = rematplan.planning(model).stats()
    assert stats.plans == 6
    assert stats.swaps > 0
    overheads = {plan.estimate.overhead for plan in model.plans}
    assert min(overheads) == 0.0 < max(overheads)
