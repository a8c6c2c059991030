"""The second annealing starts after the search for the bound and ends with the first annealing; its plans count."""

from __future__ import annotations

import time

from rematplan.planner.annealing.annealing_search import Search
from rematplan.planner.auto.bound_thread import BoundThread
from rematplan.planner.auto.compile_kernels import compile_kernels
from rematplan.planner.auto.second_annealer import SecondSearch
from rematplan.planner.bounds.bound_search import BoundSearch
from rematplan.planner.core.effort import Effort
from rematplan.planner.core.plan import plan_from_runs


def test_it_starts_after_the_bound_and_stops_immediately(problems):
    graph = problems.residual((2, 2))
    budget = int(0.7 * plan_from_runs(graph, [op.name for op in graph.ops], "base").estimate.peak)
    compile_kernels()
    other = Search(graph, budget, seed=1)
    with BoundThread(BoundSearch(graph, budget), Effort(0.0)) as proof, SecondSearch(other, proof, 60.0, ()):
        while other.best is None:
            time.sleep(0.05)
        began = time.process_time()
    assert time.process_time() - began < 5
    assert not proof.working
    assert other.best is not None
    assert other.best.estimate.peak <= budget


def test_it_does_not_start_while_the_bound_is_searched(problems):
    graph = problems.residual((3, 4, 6, 3))
    budget = int(0.5 * plan_from_runs(graph, [op.name for op in graph.ops], "base").estimate.peak)
    other = Search(graph, budget, seed=1)
    with BoundThread(BoundSearch(graph, budget), Effort(30)) as proof, SecondSearch(other, proof, 60.0, ()):
        time.sleep(0.2)
        assert proof.working
    assert other.best is None
    assert other.smallest is None
