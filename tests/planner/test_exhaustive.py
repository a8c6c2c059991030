"""The exhaustive search finds the optimum of small problems of any shape."""

from __future__ import annotations

import math
from dataclasses import replace
from random import Random

import pytest
from brute_force import cheapest
from hypothesis import given, settings
from hypothesis import strategies as st

from rematplan.ir import InfeasibleBudget, Op, Tensor, TrainingGraph
from rematplan.planner.auto.auto_strategy import Auto
from rematplan.planner.auto.exhaustive import exhaustive
from rematplan.planner.bounds.cut_bounds import min_peak_bound
from rematplan.planner.caches.warm_starts import transfer_plan
from rematplan.planner.core.plan import plan_from_runs
from rematplan.planner.core.schedule import runs_of

LAWS = settings(derandomize=True, deadline=None, max_examples=200)


@LAWS
@given(st.integers(0, 10**6), st.floats(0, 1), st.booleans(), st.booleans())
def test_the_cost_equals_that_of_a_plain_search_over_runs_and_frees(problems, seed, share, inverses, limited):
    rng = Random(seed)
    graph = problems.scrambled(rng, rng.randint(2, 5))
    made = [t for op in graph.ops for t in op.writes]
    if inverses and made:
        undo = Op("undo", tuple({rng.choice(made), rng.choice(made)}), (rng.choice(made),), 1.0)
        graph = replace(graph, inverses=(undo,))
    if limited:
        graph = restricted(rng, graph)
    base = plan_from_runs(graph, [op.name for op in graph.ops], "base").estimate.peak
    least = min_peak_bound(graph).bytes
    budget = int(least + share * (base - least))
    found = exhaustive(graph, budget, 10**6)
    assert found.cost == pytest.approx(cheapest(graph, budget))
    assert exhaustive(graph, budget, 10**6, found.cost).cost == math.inf
    assert exhaustive(graph, budget, 10**6, found.cost + 0.1).cost == found.cost
    if math.isfinite(found.cost):
        plan = plan_from_runs(graph, found.runs, "exhaustive")
        assert plan.estimate.peak <= budget
        assert plan.estimate.cost == pytest.approx(found.cost)


def restricted(rng, graph):
    """The problem with some ops that may run only once, and some whose first runs have an order."""
    names = [op.name for op in graph.ops]
    once, ordered = ([name for name in names if rng.random() < 0.4] for _ in range(2))
    return replace(graph, never_rerun=tuple(once), ordered=tuple(ordered))


def test_random_ops_run_even_if_nothing_reads_their_results() -> None:
    ops = (Op("draw", (), ("d",), 1.0), Op("use", ("x",), ("y",), 1.0), Op("draw again", (), ("e",), 1.0))
    tensors = tuple(Tensor(name, 8) for name in "xyde")
    graph = TrainingGraph("drawing", tensors, ("x",), ("y",), ops, ordered=("draw", "draw again"))
    found = exhaustive(graph, 24)
    assert sorted(found.runs) == ["draw", "draw again", "use"]
    assert found.runs.index("draw") < found.runs.index("draw again")


def test_an_op_may_name_a_tensor_twice_among_its_reads() -> None:
    ops = (Op("A", ("x",), ("a",), 1.0), Op("B", ("a",), ("b",), 1.0), Op("C", ("b", "b"), ("y",), 1.0))
    graph = TrainingGraph("twice", tuple(Tensor(name, 4) for name in "xaby"), ("x",), ("y",), ops)
    found = exhaustive(graph, 12)
    assert found is not None
    assert found.cost == 3.0


def test_a_plan_of_another_order_of_draws_is_not_transferred() -> None:
    ops = (Op("draw", (), ("d",), 1.0), Op("use", ("d",), ("y",), 1.0), Op("draw again", (), ("e",), 1.0))
    tensors = tuple(Tensor(name, 8) for name in "yde")
    graph = TrainingGraph("drawing", tensors, (), ("y",), ops, ordered=("draw", "draw again"))
    other = replace(graph, ops=(ops[2], *ops[:2]), ordered=("draw again", "draw"))
    plan = plan_from_runs(other, [op.name for op in other.ops], "base")
    assert transfer_plan(plan, other) is not None
    assert transfer_plan(plan, graph) is None


@pytest.mark.parametrize("seed", range(12))
def test_auto_refuses_no_budget_that_a_small_problem_with_restricted_ops_fits(problems, seed):
    rng = Random(seed)
    graph = problems.scrambled(rng, 5)
    graph = restricted(rng, replace(graph, ops=tuple(op for op in graph.ops if op.writes), ordered=()))
    base = plan_from_runs(graph, [op.name for op in graph.ops], "base").estimate.peak
    for budget in range(min_peak_bound(graph).bytes, base + 1, max(1, base // 8)):
        cost = cheapest(graph, budget)
        if math.isfinite(cost):
            plan = Auto(moves=300_000, reuse=False).plan(graph, budget)
            assert (plan.estimate.cost, plan.status) == (pytest.approx(cost), "optimal")
        else:
            with pytest.raises(InfeasibleBudget) as refused:
                Auto(moves=300_000, reuse=False).plan(graph, budget)
            assert refused.value.known == "proven"


def test_auto_proves_plans_optimal_that_take_many_sets_of_tensors(problems):
    """Linear relaxations do not prove this plan optimal. States that cost as much as the best plan are left out."""
    graph = problems.random_training(Random(45), 6)
    base = plan_from_runs(graph, [op.name for op in graph.ops], "base").estimate.peak
    least = min_peak_bound(graph).bytes
    budget = (least + base) // 2
    assert exhaustive(graph, budget) is None
    plan = Auto(moves=6_000_000, reuse=False).plan(graph, budget)
    assert plan.status == "optimal"
    assert plan.estimate.cost == pytest.approx(exhaustive(graph, budget, 10**6).cost)
    assert exhaustive(graph, budget, below=plan.estimate.cost).cost == math.inf


def test_small_training_steps_are_solved(problems):
    graph = problems.chain(6)
    base = plan_from_runs(graph, [op.name for op in graph.ops], "base").estimate.peak
    least = min_peak_bound(graph).bytes
    costs = [exhaustive(graph, budget).cost for budget in (*range(least, base, 1024), base)]
    assert costs == sorted(costs, reverse=True)
    assert costs[0] > costs[-1] == pytest.approx(graph.base_cost)


def test_problems_with_many_sets_of_tensors_to_free_are_given_up():
    """One of a chain's 24 tensors that are all read at the end must be run beside 13 others at most. Most sets lead to
    known states."""
    names = [f"t{i}" for i in range(24)]
    chain = [Op(f"op{i}", tuple(names[i - 1 : i] if i else ()), (t,), 1.0) for i, t in enumerate(names)]
    ops = (*chain, Op("wide", (names[-1],), ("w",), 1.0, workspace=10), Op("end", (*names, "w"), ("y",), 1.0))
    tensors = tuple(Tensor(t, 1) for t in (*names, "w", "y"))
    graph = TrainingGraph(name="chain", tensors=tensors, inputs=(), outputs=("y",), ops=ops)
    assert exhaustive(graph, 26) is None


def test_the_bound_does_not_count_ops_that_schedules_may_leave_out():
    ops = (Op("a", (), ("t",), 1.0), Op("print", ("t",), (), 5.0), Op("b", ("t",), ("y",), 1.0))
    graph = TrainingGraph("silent", (Tensor("t", 1), Tensor("y", 1)), (), ("y",), ops)
    plan = Auto(moves=100_000, reuse=False).plan(graph, 2)
    assert sorted(runs_of(plan.schedule)) == ["a", "b", "print"]
    assert plan.lower_bound <= 2 / 7 - 1 + 1e-9
