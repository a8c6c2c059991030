"""A refusal names two budgets that can be planned, the second of them cheaply, and is quick if it is proven."""

from __future__ import annotations

import time
from dataclasses import replace
from random import Random
from types import ModuleType

import pytest

from rematplan.ir import CHEAP, InfeasibleBudget, TrainingGraph
from rematplan.planner.annealing.cheap_plan import cheap_plan
from rematplan.planner.auto.auto_strategy import Auto
from rematplan.planner.auto.compile_kernels import compile_kernels
from rematplan.planner.bounds.cut_bounds import min_peak_bound
from rematplan.planner.caches.plan_store import PlanStore
from rematplan.planner.core.effort import Effort
from rematplan.planner.core.strategy import Strategy
from rematplan.planner.strategies.anneal import Anneal
from rematplan.planner.strategies.chen_sqrt import ChenSqrt
from rematplan.planner.strategies.ilp import ILP
from rematplan.planner.strategies.nested_dp import NestedDP
from rematplan.planner.strategies.store_all import StoreAll, no_recompute
from rematplan.plans import leanest_plan
from rematplan.plans.budget_searches import plan_within
from rematplan.plans.leanest_plan import check_floor

QUICK = 30.0  # seconds on a machine with much other work; it takes about five


def refusal(strategy: Strategy, graph: TrainingGraph, budget: int) -> InfeasibleBudget:
    with pytest.raises(InfeasibleBudget) as caught:
        strategy.plan(graph, budget)
    return caught.value


@pytest.mark.parametrize(
    "strategy",
    [
        Auto(moves=200_000, reuse=False),
        Anneal(moves=60_000),
        ChenSqrt(),
        NestedDP(),
        StoreAll(),
        ILP(time_limit=0.5),
    ],
)
def test_the_named_budgets_can_be_planned(problems: ModuleType, strategy: Strategy) -> None:
    graph = problems.residual((2, 2))
    error = refusal(strategy, graph, min_peak_bound(graph).bytes - 1)
    assert error.plan.peak == error.smallest <= error.cheap <= no_recompute(graph).peak
    assert strategy.plan(graph, error.cheap).estimate.overhead <= CHEAP
    assert f"({error.cheap} bytes)" in str(error)


def test_the_named_budgets_need_no_search_afterwards(problems: ModuleType) -> None:
    graph, store = problems.residual((2, 2)), PlanStore()
    with pytest.raises(InfeasibleBudget) as caught:
        plan_within(Anneal(moves=60_000), graph, min_peak_bound(graph).bytes - 1, store=store)
    error = caught.value
    for budget, plan in ((error.smallest, error.plan), (error.cheap, error.cheap_plan)):
        assert plan.peak == budget
        hurried = plan_within(Anneal(moves=1), graph, budget, store=store)
        assert hurried.estimate.cost <= plan.estimate.cost


def test_the_cheap_plan_is_the_leanest_of_those_known_or_leaner(problems: ModuleType) -> None:
    graph = problems.residual((3, 4, 6, 3))
    known = NestedDP().curve(graph, ())
    cheap = [p for p in known if p.estimate.overhead <= CHEAP]
    found = cheap_plan(graph, known, Effort(moves=60_000))
    assert found.estimate.overhead <= CHEAP
    assert found.peak <= min(p.peak for p in cheap)
    assert found.peak < 0.8 * no_recompute(graph).peak


def test_a_refusal_without_a_search_names_both_budgets_too(problems: ModuleType) -> None:
    graph = problems.residual((2, 2))
    with pytest.raises(InfeasibleBudget) as caught:
        check_floor(Auto(), graph, min_peak_bound(graph).bytes - 1)
    error = caught.value
    assert error.plan.peak == error.smallest < error.cheap < no_recompute(graph).peak


def test_a_later_refusal_at_other_sizes_takes_known_plans_without_a_search(
    problems: ModuleType, monkeypatch: pytest.MonkeyPatch
) -> None:
    graph, store = problems.residual((2, 2)), PlanStore()
    with pytest.raises(InfeasibleBudget) as first:
        plan_within(Auto(), graph, min_peak_bound(graph).bytes - 1, store=store, hurried=True)
    larger = replace(graph, tensors=tuple(replace(t, bytes=2 * t.bytes) for t in graph.tensors))
    monkeypatch.setattr(leanest_plan, "find_smallest_peak", None)
    with pytest.raises(InfeasibleBudget) as second:
        plan_within(Auto(), larger, min_peak_bound(larger).bytes - 1, store=store, hurried=True)
    assert second.value.smallest <= 2 * first.value.smallest


@pytest.mark.parametrize("strategy", [StoreAll(), ChenSqrt(), Anneal(moves=100)])
def test_what_is_proven_is_said_whatever_the_strategy(problems: ModuleType, strategy: Strategy) -> None:
    graph = problems.residual((2, 2))
    floor = min_peak_bound(graph).bytes
    for budget, proven in ((floor - 1, True), (floor, False)):
        with pytest.raises(InfeasibleBudget) as caught:
            plan_within(strategy, graph, budget)
        assert (caught.value.known == "proven") == proven
        assert ("is proven to be too small for any plan" in str(caught.value)) == proven


def test_a_refusal_is_proven_if_the_search_for_its_smallest_peak_proves_that_peak(
    problems: ModuleType,
) -> None:
    graph = problems.random_training(Random(1), 9)
    error = refusal(Auto(moves=10**9, reuse=False), graph, 63104 - 1)  # they would take hours
    assert (error.smallest, error.known) == (63104, "proven")


def test_a_proven_refusal_is_quick_whatever_the_time_limit(problems: ModuleType) -> None:
    graph = problems.unet(4)
    compile_kernels()
    began = time.process_time()
    error = refusal(Auto(moves=90_000_000, reuse=False), graph, min_peak_bound(graph).bytes - 1)
    assert error.known == "proven"
    assert time.process_time() - began < QUICK
