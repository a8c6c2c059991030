"""Laws of plans that are exchanged while training runs: equal bits, within the budget, between two steps only."""

from __future__ import annotations

import copy
import threading
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from elsewhere import Elsewhere, begin_with_the_leanest, with_no_plans
from torch import Tensor, nn

import rematplan
from rematplan.planner.auto.auto_strategy import Auto
from rematplan.planner.caches.plan_store import PlanStore
from rematplan.planner.core.plan import Plan
from rematplan.planner.strategies.approx_dp import ApproxDP
from rematplan.planner.strategies.store_all import no_recompute
from rematplan.plans import refining
from rematplan.runtime.costs.measure import peak_above_entry

X = torch.randn(8, 16, generator=torch.Generator().manual_seed(1))


class Network(nn.Module):
    """Linear layers with dropout and batch norm, so that random numbers and buffers take part."""

    def __init__(self, depth: int = 4) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.layers = nn.ModuleList(nn.Linear(16, 16) for _ in range(depth))
        self.norm = nn.BatchNorm1d(16)

    def forward(self, x: Tensor) -> Tensor:
        """A loss."""
        for layer in self.layers:
            x = nn.functional.dropout(torch.tanh(layer(x)), 0.1)
        return self.norm(x).pow(2).mean()


class Certain(Network):
    """The same layers without random numbers."""

    def forward(self, x: Tensor) -> Tensor:
        """A loss."""
        for layer in self.layers:
            x = torch.tanh(layer(x)).sin()
        return self.norm(x).pow(2).mean()


@pytest.fixture
def elsewhere(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Elsewhere:
    """The stand-in, and a quick search that gives a dear plan which leaves something to improve."""
    with_no_plans(monkeypatch, tmp_path)
    one = Elsewhere()
    monkeypatch.setattr(refining, "shared", lambda: one)
    begin_with_the_leanest(monkeypatch.setattr)
    return one


def planned(model: nn.Module, budget: str = "100%", **options: Any) -> nn.Module:
    return rematplan.plan_module(model, (X,), budget=budget, costs="roofline", loss_memory=0, **options)


def step(model: nn.Module, optimizer: torch.optim.Optimizer | None, seed: int, **options: Any) -> Tensor:
    torch.manual_seed(seed)
    loss = model(X)
    loss.backward(**options)
    if optimizer is not None:
        optimizer.step()
        optimizer.zero_grad()
    return loss


def swaps(model: nn.Module) -> int:
    return rematplan.planning(model).stats().swaps


def test_a_better_plan_is_taken_at_the_next_step_and_shown(elsewhere: Elsewhere) -> None:
    model = planned(Network())
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    first = model.plan
    step(model, optimizer, 0)
    better = elsewhere.find()
    assert better.estimate.cost < first.estimate.cost
    assert model.plan.estimate == first.estimate
    step(model, optimizer, 1)
    assert model.plan.estimate == better.estimate
    assert swaps(model) == 1


@pytest.mark.parametrize("reuse", [True, False])
def test_a_plan_that_another_process_solved_ends_the_search_unless_plans_on_disk_are_not_to_be_used(
    elsewhere: Elsewhere, monkeypatch: pytest.MonkeyPatch, reuse: bool
) -> None:
    monkeypatch.setattr(PlanStore, "solved", lambda _self, graph, *_: no_recompute(graph))
    planned(Network(), budget="90% of activations", strategy=rematplan.Auto(reuse=reuse))
    assert len(elsewhere.searches) == (0 if reuse else 1)


def test_no_worse_plan_is_taken(elsewhere: Elsewhere) -> None:
    model = planned(Network())
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    elsewhere.find()
    step(model, optimizer, 0)
    elsewhere.find(rank=1)
    step(model, optimizer, 1)
    assert swaps(model) == 1


def test_a_bound_that_is_proved_later_is_shown(elsewhere: Elsewhere) -> None:
    model = planned(Network())
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    first, (_, _, heard) = model.plan, elsewhere.searches[0]
    for floor in (0.02, 0.01):
        heard(replace(first, lower_bound=floor), False)
        step(model, optimizer, 0)
        assert model.plan.lower_bound == 0.02
        assert rematplan.planning(model).stats().gaps == (first.estimate.overhead - 0.02,)
    assert swaps(model) == 0


def test_60_steps_with_plans_found_at_any_time_give_the_bits_of_eager_mode(elsewhere: Elsewhere) -> None:
    draws = torch.Generator().manual_seed(7)
    model = planned(Network())
    plain = Network()
    optimizers = [torch.optim.SGD(m.parameters(), lr=0.1, momentum=0.9) for m in (model, plain)]
    problem, budget, heard = elsewhere.searches[0]
    plans = [p for p in ApproxDP().curve(problem, ()) if p.estimate.peak <= budget]
    entry = model._rematplan.last
    for k in range(60):
        if torch.rand((), generator=draws) < 0.3:
            entry.running.refinement._best = float("inf")  # so that any plan counts as better
            heard(plans[int(torch.randint(len(plans), (), generator=draws))], False)
        losses = [step(m, o, k) for m, o in zip((model, plain), optimizers, strict=True)]
        assert torch.equal(*losses)
    assert swaps(model) > 10
    assert all(map(torch.equal, model.state_dict().values(), plain.state_dict().values()))


def test_two_modules_in_two_threads_exchange_plans_that_a_third_thread_finds(elsewhere: Elsewhere) -> None:
    """Plans arrive at any time, also amid a step. Nothing is random, because threads share a generator."""
    models, plains = ([Certain(depth) for depth in (4, 5)] for _ in range(2))
    modules = [planned(m) for m in models]
    plans = [
        [p for p in ApproxDP().curve(problem, ()) if p.estimate.peak <= budget]
        for problem, budget, _ in elsewhere.searches
    ]
    assert len(plans) == 2
    entries = [m._rematplan.last for m in modules]
    training, arrived, failed = threading.Event(), threading.Event(), list[BaseException]()

    def train(model: nn.Module) -> None:
        try:
            optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
            for k in range(100):
                if k == 50:
                    arrived.wait(60)  # so that a plan is exchanged, however slowly the third thread runs
                model(X).backward()
                optimizer.step()
                optimizer.zero_grad()
        except BaseException as error:
            failed.append(error)

    def find() -> None:
        k = 0
        while not training.is_set():
            k += 1
            for (_, _, heard), entry, found in zip(elsewhere.searches, entries, plans, strict=True):
                entry.running.refinement._best = float("inf")  # so that any plan counts as better
                heard(found[k % len(found)], False)
            if k == 2:
                arrived.set()
            time.sleep(0.001)

    finder = threading.Thread(target=find)
    threads = [threading.Thread(target=train, args=(m,)) for m in modules]
    for thread in (finder, *threads):
        thread.start()
    for thread in threads:
        thread.join()
    training.set()
    finder.join()
    assert not failed
    for module, plain in zip(modules, plains, strict=True):
        train(plain)
        assert swaps(module) > 0
        assert all(map(torch.equal, module.state_dict().values(), plain.state_dict().values()))


def test_a_plan_waits_for_the_backward(elsewhere: Elsewhere) -> None:
    model = planned(Network())
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    step(model, optimizer, 0)
    pending = model(X)
    elsewhere.find()
    model(X).backward()
    assert swaps(model) == 0
    pending.backward()
    optimizer.zero_grad()
    model(X).backward()
    assert swaps(model) == 1


def test_a_plan_waits_while_a_graph_is_retained(elsewhere: Elsewhere) -> None:
    model = planned(Network())
    loss = step(model, None, 0, retain_graph=True)
    elsewhere.find()
    model.zero_grad()
    step(model, None, 1)
    assert swaps(model) == 0
    del loss
    model.zero_grad()
    step(model, None, 2)
    assert swaps(model) == 1


@pytest.mark.parametrize("set_to_none", [True, False])
def test_a_plan_waits_for_the_last_micro_batch(elsewhere: Elsewhere, set_to_none: bool) -> None:
    model = planned(Network(), reserved=["gradients"])
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for k in range(6):
        step(model, None, k)
        if k == 1:
            elsewhere.find()
        if k % 3 == 2:
            assert swaps(model) == (k > 3)
            optimizer.step()
            optimizer.zero_grad(set_to_none=set_to_none)
    assert swaps(model) == 1


def test_after_an_exchange_a_plan_is_checked_again_for_earlier_gradients(elsewhere: Elsewhere) -> None:
    """The first plan leaves room for gradients of earlier steps, the better one does not."""
    x = X.repeat(16, 1)
    model = rematplan.plan_module(Network(), (x,), budget="100%", costs="roofline", loss_memory=0)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    budget = model.plan.budget
    resident = sum(t.nbytes for t in (*model.parameters(), *model.buffers(), x))

    def accumulated() -> int:
        model(x).backward()
        gradients = sum(p.grad.nbytes for p in model.parameters() if p.grad is not None)
        peak, _ = peak_above_entry(lambda: model(x).backward(), torch.device("cpu"))
        optimizer.step()
        optimizer.zero_grad()
        return resident + gradients + peak

    assert accumulated() <= budget
    better = elsewhere.find()
    gradients = sum(p.nbytes for p in model.parameters())
    assert better.estimate.peak <= budget < better.estimate.peak + gradients
    assert accumulated() <= budget
    assert swaps(model) == 1


def test_copies_go_on_with_the_plan_that_they_are_copied_with(elsewhere: Elsewhere) -> None:
    model = planned(Network())
    twin = copy.deepcopy(model)
    elsewhere.find()
    for one in (model, twin):
        optimizer = torch.optim.SGD(one.parameters(), lr=0.1)
        step(one, optimizer, 0)
    assert all(map(torch.equal, model.state_dict().values(), twin.state_dict().values()))


@pytest.mark.parametrize(
    "options",
    [
        {"refine": False},
        {"strategy": Auto(deterministic=True, time_limit=2.0)},
        {"strategy": "approx_dp"},
        {"budget": "min", "strategy": Auto(time_limit=1.6)},
        {"strategy": Auto(time_limit=1.0)},
        {"inverses": True, "strategy": Auto(time_limit=1.6)},
    ],
    ids=str,
)
def test_where_nothing_is_searched_later(elsewhere: Elsewhere, options: dict[str, Any]) -> None:
    planned(Network(2), **options)
    assert not elsewhere.searches


def test_deterministic_planning_makes_the_same_plan_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    schedules = []
    for k in range(2):
        monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / str(k)))
        model = planned(
            Network(),
            budget="80% of activations",
            strategy=rematplan.Auto(time_limit=0.5, deterministic=True),
        )
        schedules.append(model.plan.schedule)
    assert schedules[0] == schedules[1]


def test_a_plan_of_another_process_is_used_without_a_search(elsewhere: Elsewhere, tmp_path: Path) -> None:
    first = planned(Network())
    problem, budget, _ = elsewhere.searches[0]
    best = elsewhere.find()
    first._rematplan.planner.store.save(problem, replace(best, budget=budget), seconds=30.0)
    later = planned(Network())
    assert later.plan.estimate == best.estimate
    assert len(elsewhere.searches) == 1


def no_search(*_: Any, **__: Any) -> Plan:
    raise AssertionError("a plan that fits is known")


def test_another_size_begins_with_the_best_plan_that_fits_and_no_search(
    elsewhere: Elsewhere, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("rematplan.plans.first_plan.no_recompute", no_recompute)
    x = X.repeat(16, 1)
    model = rematplan.plan_module(Network(), (x,), budget="70%", costs="roofline", loss_memory=0)
    best = elsewhere.find()
    monkeypatch.setattr("rematplan.planner.auto.auto_strategy.Auto.plan", no_search)
    model(x[:-1]).backward()
    assert model.plan.schedule == best.schedule
    assert model.plan.peak <= model.plan.budget == model.plans[0].budget
    assert len(elsewhere.searches) == 2


def test_nothing_is_searched_where_nothing_needs_to_be_recomputed(
    elsewhere: Elsewhere, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("rematplan.plans.first_plan.no_recompute", no_recompute)
    monkeypatch.setattr("rematplan.planner.auto.auto_strategy.Auto.plan", no_search)
    model = planned(Network())
    assert (model.plan.status, model.plan.gap, model.plan.estimate.reruns) == ("optimal", 0.0, 0)
    assert model.plan.budget == model.plan.peak
    assert not elsewhere.searches


@pytest.fixture
def first_use(elsewhere: Elsewhere, monkeypatch: pytest.MonkeyPatch) -> Elsewhere:
    """A machine that has not compiled the planner's loops yet."""
    monkeypatch.setattr("rematplan.plans.first_plan.no_recompute", no_recompute)
    monkeypatch.setattr("rematplan.plans.first_plan.kernels_are_ready", lambda: False)
    return elsewhere


def test_training_begins_with_a_plan_of_plain_python_while_loops_are_compiled(
    first_use: Elsewhere, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr("rematplan.planner.auto.auto_strategy.Auto.plan", no_search)
    with caplog.at_level("INFO", "rematplan"):
        model = planned(Network(), budget="90% of activations")
    assert model.plan.strategy in ("chen_sqrt", "chen_greedy", "eviction")
    assert model.plan.peak <= model.plan.budget
    assert len(first_use.searches) == 1
    said = [r.message for r in caplog.records if "not compiled" in r.message]
    assert len(said) == 1
    assert f"starts with a plan of {model.plan.strategy}" in said[0]


def test_a_budget_that_no_such_plan_fits_is_searched_all_the_same(
    first_use: Elsewhere, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr("rematplan.plans.first_plan.uncompiled_plan", lambda *_: None)
    with caplog.at_level("INFO", "rematplan"):
        model = planned(Network(), budget="90% of activations")
    assert model.plan.strategy == "auto"
    assert "so the first step waits" in caplog.text
