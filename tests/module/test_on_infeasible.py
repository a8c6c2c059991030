"""Laws of calls for which no plan keeps the budget: a training run goes on, says what it needs, and searches once."""

from __future__ import annotations

import pickle
import time
import warnings
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional

import rematplan
from rematplan.ir import InfeasibleBudget, TrainingGraph, UsageError, show_bytes
from rematplan.planner.auto.auto_strategy import Auto
from rematplan.planner.core.plan import Plan
from rematplan.planner.strategies.approx_dp import ApproxDP
from rematplan.planner.strategies.store_all import no_recompute
from rematplan.plans.options import PlanOptions
from rematplan.plans.planner import Planner
from rematplan.runtime.capture.capture import capture
from rematplan.runtime.costs.measure import peak_above_entry

WIDTH, CLASSES = 64, 10


def network() -> nn.Module:
    torch.manual_seed(0)
    layers = [m for _ in range(4) for m in (nn.Linear(WIDTH, WIDTH), nn.GELU())]
    return nn.Sequential(*layers, nn.Dropout(0.1), nn.Linear(WIDTH, CLASSES))


def rows(n: int) -> Tensor:
    return torch.randn(n, WIDTH, generator=torch.Generator().manual_seed(n))


def planned_for(n: int, **options: Any) -> nn.Module:
    options = {"strategy": "approx_dp", "costs": "roofline", "budget": "75%", **options}
    return rematplan.plan_module(network(), (rows(n),), **options)


def step(model: nn.Module, n: int) -> None:
    torch.manual_seed(n)
    functional.cross_entropy(model(rows(n)), torch.arange(n) % CLASSES).backward()


def test_a_later_call_takes_the_leanest_plan_and_says_what_it_needs() -> None:
    planned, plain = planned_for(256), network()
    step(planned, 256)
    budget = planned.plan.budget
    planned.zero_grad()
    with pytest.warns(UserWarning, match="plan of the smallest found peak") as said:
        step(planned, 8192)
    needed = planned.plan.peak
    assert needed > budget
    assert planned.plan.estimate.reruns > 0
    assert f"{show_bytes(needed)} ({needed} bytes)" in str(said[0].message)
    assert f"above the budget of {show_bytes(budget)}" in str(said[0].message)
    assert said[0].filename == __file__
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        for n in (8192, 256):
            planned.zero_grad()
            plain.zero_grad()
            step(planned, n)
            step(plain, n)
            for ours, eager in zip(planned.parameters(), plain.parameters(), strict=True):
                assert torch.equal(ours.grad, eager.grad)


def test_what_is_asked_for_is_done_at_the_first_plan_too() -> None:
    for how in (None, "raise"):
        with pytest.raises(InfeasibleBudget):
            planned_for(256, budget=1000, on_infeasible=how)
    with pytest.warns(UserWarning, match="the smallest found"):
        lean = planned_for(256, budget=1000, on_infeasible="least").plan
    with pytest.warns(UserWarning, match="a plan that recomputes nothing"):
        eager = planned_for(256, budget=1000, on_infeasible="eager").plan
    assert lean.peak < eager.peak
    assert eager.estimate.reruns == 0
    assert (lean.budget, eager.budget) == (lean.peak, eager.peak)


def test_a_later_call_raises_where_that_is_asked_for() -> None:
    planned = planned_for(256, on_infeasible="raise")
    with pytest.raises(InfeasibleBudget):
        step(planned, 8192)
    assert len(planned.plans) == 1
    step(planned, 256)


@pytest.mark.parametrize(("kind", "options"), [(ApproxDP, {}), (Auto, {"strategy": Auto(time_limit=0.1)})])
def test_no_call_searches_again_for_what_was_not_found(
    kind: Any, options: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    planned = planned_for(256, on_infeasible="raise", **options)
    searched, search = [], kind.plan

    def counted(self: Any, graph: TrainingGraph, *rest: Any) -> Plan:
        searched.append(graph)
        return search(self, graph, *rest)

    monkeypatch.setattr(kind, "plan", counted)
    messages = []
    for _ in range(3):
        with pytest.raises(InfeasibleBudget) as refused:
            planned.prepare(rows(8192))
        messages.append(str(refused.value))
    twin = pickle.loads(pickle.dumps(planned))
    with pytest.raises(InfeasibleBudget):
        twin.prepare(rows(8192))
    assert len(searched) == 1
    assert len(set(messages)) == 1


def test_gradients_of_earlier_steps_raise_where_that_is_asked_for() -> None:
    least = planned_for(256, budget="min").plan.peak
    planned = planned_for(256, budget=least + 1000, on_infeasible="raise")
    step(planned, 256)
    with pytest.raises(InfeasibleBudget) as refused:
        step(planned, 256)
    assert refused.value.smallest > refused.value.budget == least + 1000


@pytest.mark.parametrize("how", ["least", "eager"])
def test_accumulation_keeps_to_the_bytes_that_the_warning_states(how: str) -> None:
    stated = {"budget": 1000, "reserved": ["gradients"], "on_infeasible": how, "loss_memory": "3x"}
    with pytest.warns(UserWarning, match="above the budget") as said:
        planned = planned_for(256, costs="profile", **stated)
    needed = planned.plan.peak
    assert any(f"its peak is {show_bytes(needed)} ({needed} bytes)" in str(one.message) for one in said)
    x = rows(256)
    for _ in range(3):
        held = [x, *planned.parameters(), *(p.grad for p in planned.parameters() if p.grad is not None)]
        above, _ = peak_above_entry(
            lambda: functional.cross_entropy(planned(x), torch.arange(256) % CLASSES).backward(),
            torch.device("cpu"),
        )
        assert sum(t.nbytes for t in held) + above <= needed


@pytest.mark.parametrize("strategy", [Auto(time_limit=0.1), rematplan.ILP(time_limit=0.2)])
def test_what_a_later_call_uses_is_as_lean_as_block_plans_and_named_in_the_warning(strategy: Any) -> None:
    block = planned_for(8192, budget="least").plan.peak
    planned = planned_for(256, strategy=strategy)
    with pytest.warns(UserWarning, match=r"the smallest found is .* \((\d+) bytes\)") as said:
        planned.prepare(rows(8192))
    assert planned.plan.peak <= block
    assert f"({planned.plan.peak} bytes); a plan that costs at most 5 %" in str(said[0].message)


def test_block_plans_serve_where_a_search_leaves_no_plan() -> None:
    captured = capture(network(), (rows(512),), "network")
    planner = Planner(PlanOptions(budget=1000, costs="roofline", on_infeasible="least"))
    graph = planner.problem(captured)
    with pytest.warns(UserWarning, match="smallest found"):
        plan = planner.instead(captured, InfeasibleBudget("ilp", 1000, 2000, "searched"), first=True)
    assert plan.peak < 0.6 * no_recompute(graph).estimate.peak
    assert plan.peak <= ApproxDP(objective="memory").curve(graph, ())[-1].estimate.peak


def test_a_call_that_can_fit_no_plan_waits_for_no_search() -> None:
    patient = planned_for(64, budget="100%", strategy=rematplan.Auto(reuse=False, time_limit=300.0))
    began = time.process_time()
    with pytest.warns(UserWarning, match="proven to be too small .* plan of the smallest found peak"):
        patient.prepare(rows(65536))
    took = time.process_time() - began
    assert took < 30  # a tenth of the limit; it takes about two seconds
    assert patient.plan.peak < 0.7 * planned_for(65536, budget="100%").plan.peak


def test_an_unknown_reaction_is_refused() -> None:
    with pytest.raises(UsageError, match="unknown on_infeasible 'ignore'; known: raise, least, eager"):
        planned_for(256, on_infeasible="ignore")


def test_a_refusal_is_pickled_with_its_figures() -> None:
    error = InfeasibleBudget("auto", 1, 2, "proven", "3 bytes", "ask for more")
    twin = pickle.loads(pickle.dumps(error))
    assert str(twin) == str(error)
    assert (twin.budget, twin.smallest, twin.known, twin.floor) == (1, 2, "proven", "3 bytes")
