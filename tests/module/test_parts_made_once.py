"""Laws of what planning in parts does once, and of batches without plain sizes."""

import copy
from typing import Any

import numpy
import pytest
import torch
from same_bits import SETTINGS, same_grads
from torch import Tensor, nn
from torch.nested import nested_tensor, to_padded_tensor

import rematplan
from rematplan.module.forward_capture import Tracing
from rematplan.module.plan_access import runner_of
from rematplan.parts.rehearsal import Rehearsal
from rematplan.planner.pipeline import rank_search
from rematplan.runtime.guards.assertions import SpeculatedAssertions


def block() -> nn.Module:
    return nn.Sequential(nn.Linear(16, 64), nn.GELU(), nn.Linear(64, 16))


class Dropping(nn.Module):
    """Blocks that NumPy's draws leave out."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(block() for _ in range(3))

    def forward(self, x: Tensor) -> Tensor:
        for one in self.blocks:
            x = one(x) if numpy.random.uniform() > 0.2 else x
        return x.square().mean()


def test_the_plans_within_the_least_budget_begin_with_those_that_found_it(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    calls = list[Any]()
    search = rank_search.find_lean_plans
    monkeypatch.setattr(rank_search, "find_lean_plans", lambda *given: calls.append(given) or search(*given))
    model = rematplan.apply(Dropping(), **SETTINGS)
    model(torch.randn(64, 16)).backward()
    assert len(calls) == 1
    plan = runner_of(model).parts.last.plan
    assert plan.peak <= plan.budget


class Residual(nn.Module):
    """Uses its input several times."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = block()

    def forward(self, x: Tensor) -> Tensor:
        return x + self.inner(x)


class Mixing(Dropping):
    """Reads what its residual reads, so the residual turns out to be no part."""

    def __init__(self) -> None:
        super().__init__()
        self.residual = Residual()

    def forward(self, x: Tensor) -> Tensor:
        x = self.blocks[0](2 * x)  # not a leaf, which autocast would cast once: that would be another capture
        return super().forward(self.residual(x) * x)


def test_modules_are_captured_once_however_often_the_step_is_rehearsed(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    names, fixed, rehearsed, run = list[str](), Tracing.fixed, list[Rehearsal](), Rehearsal.run
    monkeypatch.setattr(Tracing, "fixed", lambda self: names.append(self.name) or fixed(self))
    monkeypatch.setattr(Rehearsal, "run", lambda self, *given: rehearsed.append(self) or run(self, *given))
    model = rematplan.apply(Mixing(), **SETTINGS)
    plain = rematplan.remove(copy.deepcopy(model))
    for one in (model, plain):
        numpy.random.seed(0)
        one(torch.ones(64, 16, requires_grad=True)).backward()
    assert len(rehearsed) == 2
    assert len({*names}) == len(names) == 3  # the whole, the residual, and one block for all
    assert same_grads(model, plain)


def test_with_counted_moves_the_plans_of_parts_are_always_the_same() -> None:
    found = []
    for _ in range(2):
        numpy.random.seed(0)
        asked = SETTINGS | {"budget": "85%", "strategy": rematplan.Auto(moves=2000)}
        model = rematplan.apply(Dropping(), **asked)
        model(torch.randn(64, 16)).backward()
        plan = runner_of(model).parts.last.plan
        found.append((plan.peak, *(part.made.plan.schedule for part in plan.parts.values())))
    assert found[0] == found[1]


class Matching(nn.Module):
    """Checks its activations, and then lists them."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.Sequential(block(), block())

    def forward(self, x: Tensor) -> Tensor:
        h = self.blocks(x).sigmoid()
        if not (h >= 0).all():
            raise ValueError("below zero")
        if not (h <= 1).all():
            raise ValueError("above one")
        chosen = [row.index(max(row)) for row in h[:2].tolist()]
        loss: Tensor = nn.functional.nll_loss(h[:2], torch.tensor(chosen))
        return loss


def test_a_forward_that_cannot_be_captured_is_traced_twice_for_each_condition(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    traces, traced = list[str](), SpeculatedAssertions.traced
    monkeypatch.setattr(
        SpeculatedAssertions,
        "traced",
        lambda self, trace: traced(self, lambda: traces.append("trace") or trace()),
    )
    model = rematplan.apply(Matching(), **SETTINGS)
    model(torch.randn(64, 16)).backward()
    # With and without `torch.compiler.is_compiling()`: a trace, and two for each of two conditions.
    assert len(traces) == 2 * (1 + 2 * 2)
    assert runner_of(model).parts


class Padding(nn.Module):
    """A layer for nested tensors, and blocks for dense ones."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.blocks = nn.Linear(16, 16), nn.Sequential(block(), block())

    def forward(self, x: Tensor) -> Tensor:
        dense: Tensor = self.blocks(to_padded_tensor(self.first(x), 0.0))
        return dense.square().mean()


@pytest.mark.parametrize("layout", [torch.jagged, torch.strided])
@pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors")
def test_batches_of_nested_tensors_are_planned_in_parts(layout: torch.layout) -> None:
    eager = Padding()
    planned = rematplan.apply(copy.deepcopy(eager), **SETTINGS)
    for at in range(3):
        given = nested_tensor([torch.randn(rows, 16) for rows in (5, 20, 7 + at)], layout=layout)
        for model in (eager, planned):
            model.zero_grad()
            model(given).backward()
        assert same_grads(eager, planned)
    assert len(rematplan.planning(planned).plans) == 1
