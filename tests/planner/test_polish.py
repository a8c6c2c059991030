"""Polishing gives cheaper and cheaper valid plans within the budget, from plans of other sizes."""

from __future__ import annotations

from dataclasses import replace
from random import Random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from rematplan.planner.annealing.polish import polished
from rematplan.planner.core.plan import plan_from_runs
from rematplan.planner.core.schedule import runs_of
from rematplan.planner.core.search_rules import SearchRules
from rematplan.planner.core.simulator import simulate
from rematplan.planner.core.strategy import pareto
from rematplan.planner.strategies.anneal import Anneal
from rematplan.planner.strategies.approx_dp import ApproxDP
from rematplan.planner.strategies.store_all import no_recompute

IN_ORDER = SearchRules(keep_order=True)
PROFILE = settings(max_examples=25, deadline=None, derandomize=True)


def budget_of(graph, share):
    plans = pareto([no_recompute(graph), *ApproxDP().curve(graph, ())])
    least, most = plans[-1].estimate.peak, plans[0].estimate.peak
    return int(least + share * (most - least))


@PROFILE
@given(seed=st.integers(0, 10**9), share=st.floats(0.0, 0.9))
def test_plans_are_valid_within_the_budget_and_ever_cheaper(problems, seed, share):
    graph = problems.random_training(Random(seed), 8)
    budget = budget_of(graph, share)
    starts = ApproxDP().curve(graph, ())
    fitting = [p.estimate.cost for p in starts if p.estimate.peak <= budget]
    costs = [min(fitting)] if fitting else []
    for plan in polished(graph, budget, starts, moves=4000):
        assert plan.estimate == simulate(graph, plan.schedule)
        assert plan.estimate.peak <= budget == plan.budget
        assert not costs or plan.estimate.cost < costs[-1]
        costs.append(plan.estimate.cost)


def test_counted_moves_give_the_same_plans(problems):
    graph = problems.residual((2, 2))
    starts = ApproxDP().curve(graph, ())
    first, second = (list(polished(graph, budget_of(graph, 0.3), starts, moves=20_000)) for _ in range(2))
    assert first == second
    assert first


def test_what_a_larger_budget_does_not_need_is_removed(problems):
    graph = problems.chain(12)
    tight = min(ApproxDP().curve(graph, ()), key=lambda p: p.estimate.peak)
    whole = no_recompute(graph).estimate
    (found,) = polished(graph, whole.peak, [tight], seconds=0)
    assert found.estimate.cost == whole.cost


def test_a_plan_over_the_budget_leads_to_one_that_fits(problems):
    graph = problems.residual((2, 2))
    assert list(polished(graph, budget_of(graph, 0.5), [no_recompute(graph)], moves=40_000))


def test_plans_of_another_size_come_near_a_search_of_this_one(problems):
    graph = problems.unet(3)
    other = replace(
        graph,
        tensors=tuple(
            replace(t, bytes=t.bytes if t.name in graph.inputs else t.bytes // 2) for t in graph.tensors
        ),
    )
    search = Anneal(moves=200_000)
    shares = (0.2, 0.4, 0.6)
    plans = [search.plan(graph, budget_of(graph, share)) for share in shares]
    starts = [plan_from_runs(other, runs_of(p.schedule), "x") for p in plans]
    for share in shares:
        budget = budget_of(other, share)
        best = min(
            p.estimate.overhead
            for p in (*polished(other, budget, starts, moves=80_000), *starts)
            if p.estimate.peak <= budget
        )
        assert best <= search.plan(other, budget).estimate.overhead + 0.01


def test_a_required_order_is_kept(problems):
    graph = problems.chain(6)
    plans = list(
        polished(graph, budget_of(graph, 0.3), ApproxDP().curve(graph, ()), moves=8000, rules=IN_ORDER)
    )
    order = [op.name for op in graph.ops]
    for plan in plans:
        first = list(dict.fromkeys(runs_of(plan.schedule)))
        assert first == sorted(first, key=order.index)


def test_nothing_comes_of_nothing(problems):
    graph = problems.chain(4)
    assert not list(polished(graph, graph.input_bytes, [no_recompute(graph)], moves=1000))
    with pytest.raises(StopIteration):
        next(polished(graph, 10**9, [], moves=1000))
