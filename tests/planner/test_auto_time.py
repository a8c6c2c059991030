"""The time limit of auto holds in every phase, and an interruption in any phase returns the best plan so far. The least
peak is no larger than a block plan's, however short the limit."""

from __future__ import annotations

import time

import pytest

from rematplan.planner.auto.auto_strategy import Auto
from rematplan.planner.auto.block_starts import leanest_plans
from rematplan.planner.auto.compile_kernels import compile_kernels
from rematplan.planner.auto.smallest_peak_search import find_smallest_peak
from rematplan.planner.bounds.bound_search import BoundSearch
from rematplan.planner.bounds.loss_cut_start import cut_start
from rematplan.planner.core.effort import Effort
from rematplan.planner.core.plan import plan_from_runs

SLACK = 3.0  # CPU seconds beyond the limit


def network(problems):
    return problems.residual((3, 4, 6, 3))


def budget_of(graph, share):
    return int(share * plan_from_runs(graph, [op.name for op in graph.ops], "base").estimate.peak)


def test_a_time_limit_holds(problems):
    graph = network(problems)
    compile_kernels()
    began = time.thread_time()
    Auto(time_limit=0.5, reuse=False).plan(graph, budget_of(graph, 0.55))
    assert time.thread_time() - began < 1.0 + SLACK


@pytest.mark.parametrize("phase", ["exact_dp", "overhead"])
def test_an_interruption_in_any_phase_returns_the_best_plan_so_far(problems, phase):
    graph = network(problems)
    budget = budget_of(graph, 0.8)

    def interrupt(_fraction, text):
        if text.startswith(phase):
            raise KeyboardInterrupt

    began = time.process_time()
    plan = Auto(time_limit=60, reuse=False).plan(graph, budget, interrupt)
    assert plan.estimate.peak <= budget
    assert time.process_time() - began < 30


def test_no_search_starts_after_an_interrupted_annealing(problems):
    graph = network(problems)
    after = []
    interrupted = False

    def interrupt(_fraction, text):
        nonlocal interrupted
        if interrupted:
            after.append(text)
        elif text.startswith("overhead"):
            interrupted = True
            raise KeyboardInterrupt

    Auto(time_limit=20, reuse=False).plan(graph, budget_of(graph, 0.6), interrupt)
    assert interrupted
    assert not after


def test_an_interruption_is_raised_if_no_plan_fits_yet(problems):
    graph = network(problems)

    def interrupt(_fraction, _text):
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        Auto(time_limit=60, reuse=False).plan(graph, budget_of(graph, 0.12), interrupt)


def test_no_plan_is_made_from_the_loss_cut_after_the_time_limit(problems):
    graph = problems.unet(4)
    budget = budget_of(graph, 0.8)
    bound = BoundSearch(graph, budget)
    assert cut_start(graph, bound.order, bound.loss_cut, budget)
    assert cut_start(graph, bound.order, bound.loss_cut, budget, Effort(0.0)) is None


def test_however_short_the_limit_least_is_no_larger_than_any_block_plan(problems):
    blocks = leanest_plans(problems.residual((3, 8, 12, 6)), Effort())
    found = find_smallest_peak(problems.residual((3, 8, 12, 6)), Effort(0.02))
    assert found.peak <= min(plan.peak for plan in blocks)
