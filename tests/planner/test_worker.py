"""What the background process answers: plans ever better, short searches first where plans of other sizes are known."""

from __future__ import annotations

import pytest

from rematplan.ir import InfeasibleBudget
from rematplan.ir.problem_json import problem_to_json
from rematplan.planner import worker
from rematplan.planner.caches.plan_store import PlanStore
from rematplan.planner.core.schedule import runs_of
from rematplan.planner.strategies.approx_dp import ApproxDP
from rematplan.planner.strategies.store_all import no_recompute


@pytest.fixture(autouse=True)
def _no_long_search(tmp_path, monkeypatch):
    """Searches of `auto` find nothing; no plan is on disk."""

    def plan(self, graph, budget, progress=None, starts=()):
        raise InfeasibleBudget("auto", budget, graph.input_bytes, "searched")

    monkeypatch.setattr("rematplan.planner.auto.strategy.Auto.plan", plan)
    monkeypatch.setattr("rematplan.planner.annealing.polish.SECONDS", 0.05)
    monkeypatch.setattr(PlanStore, "kept", lambda self, problem: ())


def request(graph, budget, starts):
    number = {name: k for k, name in enumerate(worker.names_of(graph))}
    return {
        "id": 1,
        "problem": problem_to_json(graph),
        "budget": budget,
        "strategy": "auto",
        "options": {"time_limit": 1.0},
        "starts": [[number[name] for name in runs_of(plan.schedule)] for plan in starts],
        "gap": 0.0,
    }


def test_plans_of_other_sizes_are_improved_by_short_searches(problems):
    graph = problems.residual((2, 2))
    plans = ApproxDP().curve(graph, ())
    budget = plans[len(plans) // 2].estimate.peak
    leanest = plans[-1]
    said = list(worker.answers(request(graph, budget, [leanest, no_recompute(graph)]), PlanStore()))
    found = [worker.plan_of(graph, answer, budget) for answer in said if "runs" in answer]
    costs = [leanest.estimate.cost, *(p.estimate.cost for p in found)]
    assert found
    assert costs == sorted(set(costs), reverse=True)
    assert all(p.estimate.peak <= budget for p in found)
    assert [answer["done"] for answer in said] == [False] * (len(said) - 1) + [True]


def test_without_plans_of_other_sizes_the_search_begins_at_once(problems):
    graph = problems.chain(8)
    leanest = ApproxDP().curve(graph, ())[-1]
    said = list(worker.answers(request(graph, no_recompute(graph).estimate.peak, [leanest]), PlanStore()))
    assert [answer["done"] for answer in said] == [True]
