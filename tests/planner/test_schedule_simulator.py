"""Tensors are freed as early as possible, and the simulator agrees with the independent checker."""

from __future__ import annotations

import itertools
from random import Random

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from rematplan.ir import ProblemError, TrainingGraph, problem_to_json
from rematplan.planner.blocks.evaluate_runs import evaluate_runs
from rematplan.planner.core.plan import plan_from_runs, plan_to_json
from rematplan.planner.core.schedule import Free, Run, runs_of, with_frees
from rematplan.planner.core.simulator import resident_bytes, simulate

PROFILE = settings(max_examples=60, deadline=None, derandomize=True)


def random_runs(graph: TrainingGraph, rng: Random, extra: int) -> list[str]:
    """The base order with some ops run again, at any later place where everything they read was once
    written."""
    runs = [op.name for op in graph.ops]
    for _ in range(extra if runs else 0):
        at = rng.randint(0, len(runs))
        before = set(runs[:at])
        again = [name for name in runs[:at] if _reads_written(graph, name, before)]
        if again:
            runs.insert(at, rng.choice(again))
    return runs


def _reads_written(graph: TrainingGraph, name: str, before: set[str]) -> bool:
    made = set(graph.inputs).union(*(graph.op[n].writes for n in before))
    return made.issuperset(graph.op[name].reads)


def best_peak(graph: TrainingGraph, runs: list[str]) -> int:
    """The least peak over every choice of frees: after each run, any subset of what is resident may go."""
    size, fixed = graph.size, set(graph.inputs)

    def go(at: int, resident: frozenset[str]) -> float:
        if at == len(runs):
            return graph.input_bytes if resident.issuperset(graph.outputs) else float("inf")
        op = graph.op[runs[at]]
        if not resident.issuperset(op.reads):
            return float("inf")
        held = resident | set(op.writes)
        now = sum(size[t] for t in held) + op.workspace
        loose = sorted(held - fixed)
        after = (
            go(at + 1, held - set(gone))
            for n in range(len(loose) + 1)
            for gone in itertools.combinations(loose, n)
        )
        return max(now, min(after))

    return int(go(0, frozenset(fixed)))


@PROFILE
@given(seed=st.integers(0, 10**9))
def test_no_other_choice_of_frees_has_a_lower_peak(problems, seed):
    rng = Random(seed)
    graph = problems.scrambled(rng, rng.randint(0, 4))
    runs = random_runs(graph, rng, 1)
    assert plan_from_runs(graph, runs, "x").estimate.peak == best_peak(graph, runs)


@PROFILE
@given(seed=st.integers(0, 10**9))
def test_simulator_agrees_with_the_checker(problems, checker, seed):
    rng = Random(seed)
    graph = problems.scrambled(rng, rng.randint(0, 30))
    plan = plan_from_runs(graph, random_runs(graph, rng, 10), "x")
    found = checker.replay(problem_to_json(graph), plan_to_json(plan))
    assert found["peak"] == plan.estimate.peak
    assert found["cost"] == pytest.approx(plan.estimate.cost)
    assert found["overhead"] == pytest.approx(plan.estimate.overhead)
    assert found["reruns"] == plan.estimate.reruns
    position = {op.name: i for i, op in enumerate(graph.ops)}
    peak, cost = evaluate_runs(
        graph, np.array([position[name] for name in runs_of(plan.schedule)], dtype=np.int64)
    )
    assert (peak, cost) == (plan.estimate.peak, pytest.approx(plan.estimate.cost))
    series = resident_bytes(graph, plan.schedule)
    assert max([graph.input_bytes, *series]) == plan.estimate.peak
    if plan.estimate.peak_at >= 0:
        assert series[plan.estimate.peak_at] == plan.estimate.peak


@PROFILE
@given(seed=st.integers(0, 10**9))
def test_simulator_and_checker_refuse_the_same_schedules(problems, checker, seed):
    rng = Random(seed)
    graph = problems.scrambled(rng, rng.randint(1, 12))
    steps = list(with_frees(graph, [op.name for op in graph.ops]))
    kind = rng.choice(["drop", "swap", "free"])
    at = rng.randrange(len(steps))
    if kind == "drop":
        del steps[at]
    elif kind == "swap":
        other = rng.randrange(len(steps))
        steps[at], steps[other] = steps[other], steps[at]
    else:
        steps.insert(at, Free(rng.choice(graph.tensors).name if graph.tensors else "nothing"))
    data = {"steps": [["run", s.op] if isinstance(s, Run) else ["free", s.tensor] for s in steps]}
    try:
        found = checker.replay(problem_to_json(graph), data)
    except checker.InvalidPlan:
        with pytest.raises(ProblemError):
            simulate(graph, tuple(steps))
    else:
        assert simulate(graph, tuple(steps)).peak == found["peak"]
