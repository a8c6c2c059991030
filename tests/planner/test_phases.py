"""Phases are inferred from the order in which tensors are read, and the plans are as good as with given phases."""

from __future__ import annotations

from dataclasses import replace
from random import Random

import pytest

from rematplan.ir import TrainingGraph, UsageError, problem_to_json
from rematplan.planner.arrays.phases import infer_phases
from rematplan.planner.auto.auto_strategy import Auto
from rematplan.planner.core.plan import plan_from_runs, plan_to_json
from rematplan.planner.registry import strategy

NETWORKS = {"residual": ((3, 4, 6, 3),), "unet": (4,), "chain": (20,)}


def unmarked(graph: TrainingGraph) -> TrainingGraph:
    return replace(graph, ops=tuple(replace(op, phase=None) for op in graph.ops))


@pytest.mark.parametrize("name", NETWORKS)
def test_the_phases_of_a_network_are_inferred(problems, name):
    graph = getattr(problems, name)(*NETWORKS[name])
    found = infer_phases(unmarked(graph))
    assert infer_phases(graph) is graph
    backward = [sum(op.phase == "backward" for op in g.ops) for g in (graph, found)]
    assert abs(backward[0] - backward[1]) <= 0.03 * len(graph.ops)


def test_other_graphs_get_no_phases(problems):
    for seed in range(30):
        graph = unmarked(problems.scrambled(Random(seed), 60))
        assert infer_phases(graph) is graph
    forward = [op for op in problems.residual((3, 4, 6, 3)).ops if op.phase == "forward"]
    graph = replace(
        unmarked(problems.residual((3, 4, 6, 3))),
        ops=tuple(replace(op, phase=None) for op in forward),
        outputs=forward[-1].writes,
    )
    assert infer_phases(graph) is graph


def test_a_network_without_given_phases_is_planned_optimally(problems, checker):
    graph = unmarked(problems.residual((2, 3, 2)))
    base = plan_from_runs(graph, [op.name for op in graph.ops], "base").estimate.peak
    plan = Auto(moves=300_000, reuse=False, gap=0.0).plan(graph, int(0.6 * base))
    assert plan.status == "optimal"
    replayed = checker.replay(problem_to_json(graph), plan_to_json(plan))
    assert replayed["peak"] == plan.estimate.peak <= plan.budget


def test_block_strategies_plan_only_problems_with_phases(problems):
    graph = problems.residual((3, 4, 6, 3))
    peaks = [strategy("chen_sqrt").curve(g, ())[-1].estimate.peak for g in (graph, unmarked(graph))]
    assert peaks[0] == peaks[1]
    with pytest.raises(UsageError, match="marked backward"):
        strategy("chen_sqrt").curve(unmarked(problems.scrambled(Random(1), 60)), ())
