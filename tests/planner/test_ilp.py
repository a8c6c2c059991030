"""The integer programs find the optimum of tiny problems, and plans that fit for larger ones."""

from __future__ import annotations

import math
from dataclasses import replace
from itertools import pairwise
from random import Random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from rematplan.ir import InfeasibleBudget, Op, Tensor, TrainingGraph, problem_to_json
from rematplan.planner.auto.auto_strategy import Auto
from rematplan.planner.auto.exhaustive import exhaustive
from rematplan.planner.core.effort import Effort
from rematplan.planner.core.plan import plan_from_runs, plan_to_json
from rematplan.planner.core.schedule import runs_of
from rematplan.planner.core.strategy import Enough
from rematplan.planner.ilp.solver import Solver
from rematplan.planner.ilp.stage_program import StageProgram, runs_at
from rematplan.planner.strategies.anneal import Anneal
from rematplan.planner.strategies.ilp import ILP

LAWS = settings(derandomize=True, deadline=None, max_examples=30)


def drawn(rng, ops, inverses):
    """A random problem: several writes an op or none, workspaces, inverses, any outputs."""
    tensors, made, known = [Tensor("x", 3)], [], ["x"]
    for i in range(ops):
        reads = tuple(dict.fromkeys(rng.choice(known) for _ in range(rng.randint(0, 3))))
        writes = tuple(f"t{i}_{k}" for k in range(rng.choice([1, 1, 1, 2, 0])))
        tensors += [Tensor(t, rng.randint(0, 9)) for t in writes]
        made.append(Op(f"o{i}", reads, writes, float(rng.randint(0, 9)), rng.choice([0, 0, 4])))
        known += writes
    back = tuple(
        Op(f"i{i}", (rng.choice(known),), (rng.choice(known[1:] or ["x"]),), float(rng.randint(0, 4)))
        for i in range(inverses)
    )
    outputs = tuple(rng.sample(known, min(len(known), 3)))
    return TrainingGraph("drawn", tuple(tensors), ("x",), outputs, tuple(made), back)


def peak_of_base(graph):
    return plan_from_runs(graph, [op.name for op in graph.ops], "base").estimate.peak


@LAWS
@given(st.integers(0, 10**6), st.integers(1, 8), st.integers(0, 2), st.floats(0.5, 1))
def test_tiny_problems_are_solved_to_the_exhaustive_optimum(seed, ops, inverses, share):
    graph = drawn(Random(seed), ops, inverses)
    budget = int(share * peak_of_base(graph))
    optimum = exhaustive(graph, budget, 10**6)
    if optimum.cost == math.inf:
        with pytest.raises(InfeasibleBudget):
            ILP().plan(graph, budget)
        return
    plan = ILP().plan(graph, budget)
    assert plan.estimate.peak <= budget
    assert plan.estimate.cost == pytest.approx(optimum.cost)


@pytest.mark.parametrize("strategy", [Auto(time_limit=2), ILP()])
def test_ops_with_empty_names_and_ops_that_write_nothing_run(strategy):
    ops = (Op("", ("x",), ("a",), 1.0), Op("b", ("a",), ("b",), 1.0), Op("says", ("x",), (), 1.0))
    graph = TrainingGraph("two", (Tensor("x", 1), Tensor("a", 2), Tensor("b", 2)), ("x",), ("b",), ops)
    assert set(runs_of(strategy.plan(graph, 5).schedule)) == {"", "b", "says"}


@pytest.mark.parametrize("share", [0.9, 0.7])
def test_larger_plans_pass_the_independent_checker(problems, checker, share):
    graph = problems.residual((1, 1))
    budget = int(share * peak_of_base(graph))
    found = []
    plan = ILP(time_limit=1.5).plan(graph, budget, lambda fraction, text: found.append((fraction, text)))
    replayed = checker.replay(problem_to_json(graph), plan_to_json(plan))
    assert replayed["peak"] == plan.estimate.peak <= plan.budget == budget
    assert 0 <= plan.lower_bound <= plan.estimate.overhead
    assert plan.status == "optimal" or "bound" in found[-1][1]
    assert all(before <= after for (before, _), (after, _) in pairwise(found))


def test_the_stage_program_finds_a_better_schedule_than_the_known_one(problems):
    graph = problems.chain(8)
    budget = int(0.7 * peak_of_base(graph))
    known = Anneal(moves=3).plan(graph, peak_of_base(graph))
    wasteful = [name for name in runs_of(known.schedule) for _ in range(2)]
    program = StageProgram(graph, budget, wasteful)
    with Solver() as solver:
        answer = solver.solve(program.rows, Effort(20), integer=True, gap=1.0)
    assert answer.done
    found = plan_from_runs(graph, runs_at(program, answer.values), "stages")
    best = Anneal(moves=60_000).plan(graph, budget)
    assert found.estimate.peak <= budget
    assert found.estimate.cost == pytest.approx(best.estimate.cost)


def test_ops_that_may_run_only_once_run_once(problems):
    chain = problems.chain(8)
    budget = int(0.8 * peak_of_base(chain))
    again = runs_of(ILP(time_limit=1).plan(chain, budget).schedule)
    repeated = next(n for n in again if again.count(n) > 1)
    bound = replace(chain, never_rerun=(repeated,))
    runs = runs_of(ILP(time_limit=1).plan(bound, budget).schedule)
    assert runs.count(repeated) == 1


def test_the_bound_holds_for_plans_with_inverses(problems):
    chain = problems.chain(8)
    convs = [op for op in chain.ops if op.name.startswith("conv")]
    undo = [Op(f"undo {op.name}", then.writes, op.writes, 0.01 * op.cost) for op, then in pairwise(convs)]
    graph = replace(chain, inverses=tuple(undo))
    budget = int(0.7 * peak_of_base(graph))
    inverting = Anneal(moves=20_000).plan(graph, budget)
    plan = ILP(time_limit=1).plan(graph, budget)
    assert inverting.estimate.overhead < plan.estimate.overhead
    assert plan.lower_bound <= inverting.estimate.overhead
    assert plan.status == "feasible"


@pytest.mark.parametrize("reason", [KeyboardInterrupt, Enough])
def test_an_interruption_returns_the_best_plan_so_far(problems, reason):
    graph = problems.residual((1, 1))

    def interrupt(fraction, text):
        if text.startswith("overhead"):
            raise reason

    budget = int(0.7 * peak_of_base(graph))
    assert ILP(time_limit=1).plan(graph, budget, interrupt).estimate.peak <= budget
