"""What the background process answers: plans ever better, short searches first where plans of other sizes are known,
and new requests before longer searches of earlier ones."""

from __future__ import annotations

import queue
from dataclasses import replace

import pytest

from rematplan.ir import InfeasibleBudget
from rematplan.ir.problem_json import problem_to_json
from rematplan.planner.annealing.polish import polished
from rematplan.planner.auto.auto_strategy import Auto
from rematplan.planner.caches.plan_store import PlanStore
from rematplan.planner.core.plan import plan_from_json
from rematplan.planner.core.schedule import runs_of
from rematplan.planner.core.strategy import Enough
from rematplan.planner.search_job import SHARES
from rematplan.planner.strategies.approx_dp import ApproxDP
from rematplan.planner.strategies.store_all import no_recompute
from rematplan.planner.worker import serve


@pytest.fixture(autouse=True)
def _quick(tmp_path, monkeypatch):
    """Searches of `auto` find nothing; no plan is on disk."""

    def plan(self, graph, budget, progress=None, starts=()):
        raise InfeasibleBudget("auto", budget, graph.input_bytes, "searched")

    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.setattr(Auto, "plan", plan)
    monkeypatch.setattr("rematplan.planner.search_job.compile_kernels", lambda: None)
    monkeypatch.setattr("rematplan.planner.search_job.polished", polished_briefly)


def polished_briefly(graph, budget, starts, **options):
    return polished(graph, budget, starts, **{**options, "moves": 3000})


def request(graph, budget, starts, number=1):
    return {
        "id": number,
        "problem": problem_to_json(graph),
        "budget": budget,
        "strategy": "auto",
        "options": {"time_limit": 1.0},
        "starts": [runs_of(plan.schedule) for plan in starts],
    }


def answers(*requests):
    """All answers to requests of which the first is being answered when the others arrive."""
    said, waiting = [], queue.Queue()
    for one in requests[1:]:
        waiting.put(one)
    serve(requests[0], waiting, said.append)
    return said


def test_plans_of_other_sizes_are_improved_by_short_searches(problems):
    graph = problems.residual((2, 2))
    plans = ApproxDP().curve(graph, ())
    budget = plans[len(plans) // 2].estimate.peak
    leanest = plans[-1]
    said = answers(request(graph, budget, [leanest, no_recompute(graph)]))
    found = [plan_from_json(answer["plan"], graph) for answer in said if "plan" in answer]
    costs = [leanest.estimate.cost, *(p.estimate.cost for p in found)]
    assert found
    assert costs == sorted(set(costs), reverse=True)
    assert all(p.estimate.peak <= budget for p in found)
    assert [answer["done"] for answer in said] == [False] * (len(said) - 1) + [True]


def test_without_plans_of_other_sizes_the_search_begins_at_once(problems):
    graph = problems.chain(8)
    leanest = ApproxDP().curve(graph, ())[-1]
    said = answers(request(graph, no_recompute(graph).estimate.peak, [leanest]))
    assert [answer["done"] for answer in said] == [True]


def test_a_plan_on_disk_that_needs_no_search_is_the_answer(problems):
    graph = problems.chain(8)
    best = no_recompute(graph)
    budget = best.estimate.peak
    PlanStore().save(graph, replace(best, budget=budget, lower_bound=0.0), seconds=1.0)
    said = answers(request(graph, budget, ApproxDP().curve(graph, ())[-2:]))
    assert [plan_from_json(answer["plan"], graph).estimate for answer in said if "plan" in answer] == [
        best.estimate
    ]


@pytest.fixture
def searches(monkeypatch):
    """The long searches that are made, by problem, with the seconds of each; the first lets another request arrive."""
    made, arriving = [], []

    def plan(self, graph, budget, progress, starts=()):
        made.append((graph.name, self.time_limit))
        if arriving:
            arriving.pop()()
        try:
            progress(0.0, "")
        except Enough:
            made.append((graph.name, "interrupted"))
            return min(starts, key=lambda p: p.estimate.peak)
        raise InfeasibleBudget("auto", budget, graph.input_bytes, "searched")

    monkeypatch.setattr(Auto, "plan", plan)
    return made, arriving


def test_a_new_request_interrupts_a_long_search_which_then_goes_on(problems, searches):
    made, arriving = searches
    first, second = problems.chain(8), problems.residual((1, 1))
    starts = [ApproxDP().curve(second, ())[-1], no_recompute(second)]
    said, waiting = [], queue.Queue()
    budget = no_recompute(second).estimate.peak - 1
    arriving.append(lambda: waiting.put(request(second, budget, starts, number=2)))
    leanest = ApproxDP().curve(first, ())[-1]
    serve(request(first, no_recompute(first).estimate.peak, [leanest]), waiting, said.append)
    assert [name for name, _ in made] == [first.name] * 2 + [second.name] * 3 + [first.name] * 3
    assert made[1] == (first.name, "interrupted")
    shares = [seconds for name, seconds in made if name == second.name]
    assert shares[0] == pytest.approx(SHARES[0], abs=0.01)
    assert said[0]["id"] == 2  # its short searches
    assert [answer["id"] for answer in said if answer["done"]] == [2, 1]


def test_short_searches_of_all_requests_go_before_any_long_one(problems, searches):
    made, _ = searches
    graph = problems.residual((1, 1))
    starts = [ApproxDP().curve(graph, ())[-1], no_recompute(graph)]
    budget = no_recompute(graph).estimate.peak - 1
    said = answers(*(request(graph, budget, starts, number) for number in (1, 2, 3)))
    first = [next(k for k, answer in enumerate(said) if answer["id"] == number) for number in (1, 2, 3)]
    done = [
        next(k for k, answer in enumerate(said) if answer["id"] == n and answer["done"]) for n in (1, 2, 3)
    ]
    assert max(first) < min(done)
    assert sorted(first, reverse=True) == first
    assert len(made) == 3 * len(SHARES)


def test_a_malformed_request_is_answered_and_others_are_served(problems):
    graph = problems.chain(8)
    good = request(graph, no_recompute(graph).estimate.peak, [no_recompute(graph)], number=2)
    said = answers({"id": 1, "problem": 3}, good)
    assert {answer["id"]: "error" in answer for answer in said if answer["done"]} == {1: True, 2: False}
