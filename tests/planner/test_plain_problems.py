"""Unusual problems without phases: auto recomputes nothing if the base order fits, finds a cheaper order if less is
needed, and refuses impossible budgets.
"""

from __future__ import annotations

import pytest

from rematplan.ir import InfeasibleBudget, Op, Tensor, TrainingGraph, problem_to_json
from rematplan.planner.auto.auto_strategy import Auto
from rematplan.planner.core.plan import plan_from_runs, plan_to_json
from rematplan.planner.core.schedule import runs_of


def problem(ops, edges=(), outputs=None, size=10, cost=1.0):
    """Ops of one output each; ``edges`` say who reads whom."""
    reads = [tuple(f"t{u}" for u, v in edges if v == i) for i in range(ops)]
    outputs = range(ops) if outputs is None else outputs
    return TrainingGraph(
        "odd",
        tuple(Tensor(f"t{i}", size) for i in range(ops)),
        (),
        tuple(f"t{i}" for i in outputs),
        tuple(Op(f"o{i}", reads[i], (f"t{i}",), cost) for i in range(ops)),
    )


CHAIN = [(i, i + 1) for i in range(23)]
ODD = {
    "one op": problem(1),
    "no edges": problem(12),
    "no edges, one output": problem(12, outputs=[3]),
    "no outputs": problem(24, CHAIN, outputs=[]),
    "two parts": problem(24, [(i, i + 2) for i in range(22)], outputs=[22, 23]),
    "all outputs": problem(24, CHAIN),
    "no sizes": problem(50, [(i, i + 1) for i in range(49)], outputs=[49], size=0),
    "no costs": problem(60, [*((i, i + 1) for i in range(59)), *((i, 59 - i) for i in range(25))], [59], cost=0.0),
    "neither": problem(20, [(0, i) for i in range(1, 20)], outputs=[5], size=0, cost=0.0),
    "all read by one": problem(42, [(i, 41) for i in range(41)], outputs=[41]),
}  # fmt: skip


@pytest.mark.parametrize("keep_order", [False, True])
@pytest.mark.parametrize("name", ODD)
def test_unusual_problems_are_planned(name, keep_order, checker):
    graph = ODD[name]
    base = plan_from_runs(graph, [op.name for op in graph.ops], "base").estimate.peak
    auto = Auto(moves=100_000, keep_order=keep_order, reuse=False)
    for budget in (base, 10**9):
        plan = auto.plan(graph, budget)
        replayed = checker.replay(problem_to_json(graph), plan_to_json(plan))
        assert replayed["peak"] == plan.estimate.peak <= budget
        assert plan.estimate.overhead <= 0  # ops that nothing needs are left out
        assert plan.status == "optimal"
        if keep_order:
            place = {op.name: i for i, op in enumerate(graph.ops)}
            first = [place[name] for name in dict.fromkeys(runs_of(plan.schedule))]
            assert first == sorted(first)


@pytest.mark.parametrize("name", ["one op", "no edges", "all outputs", "all read by one"])
def test_a_budget_below_the_need_is_refused(name):
    graph = ODD[name]
    base = plan_from_runs(graph, [op.name for op in graph.ops], "base").estimate.peak
    with pytest.raises(InfeasibleBudget) as caught:
        Auto(moves=100_000, reuse=False).plan(graph, base - 1)
    assert caught.value.smallest == base


def test_a_budget_may_exceed_what_64_bits_hold(problems):
    plan = Auto(moves=1000, reuse=False).plan(problems.chain(3), 10**30)
    assert (plan.estimate.overhead, plan.status) == (0.0, "optimal")
