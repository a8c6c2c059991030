"""Run sequences made from solutions of the multi-cut program are valid, cost what the program says, and fit the
budget at the cuts.
"""

from __future__ import annotations

import math
from random import Random

import pytest

from rematplan.ir import Op, Tensor, TrainingGraph
from rematplan.planner.annealing.annealing_search import Search
from rematplan.planner.arrays.precedence import precedence
from rematplan.planner.bounds.bound_search import BoundSearch
from rematplan.planner.bounds.cut_places import cut_candidates, heaviest_chain
from rematplan.planner.bounds.multi_cut_program import CutProgram
from rematplan.planner.bounds.runs_of_solution import bytes_at_first_run, rounded_runs
from rematplan.planner.core.effort import Effort
from rematplan.planner.core.plan import plan_from_runs
from rematplan.planner.core.schedule import with_frees
from rematplan.planner.core.simulator import simulate
from rematplan.planner.ilp.solver import Solver


@pytest.fixture(scope="module")
def solver():
    with Solver() as solver:
        yield solver


def solved(solver, graph, base, most):
    """The program of up to ``most`` cuts at the smallest of a few shares of the base order's peak that it can have, and
    an optimal solution."""
    order = precedence(graph)
    chain = heaviest_chain(graph, order)
    place = {op: k for k, (op, _) in enumerate(chain)}
    cuts = sorted(cut_candidates(graph, chain, most), key=lambda op: place[op])
    for share in (0.6, 0.7, 0.8, 0.9, 1.0):
        program = CutProgram(graph, order, cuts, int(share * base), 0)
        if not program.rows.impossible:
            answer = solver.solve(program.rows, Effort(10), integer=True, gap=1e-6)
            if answer.values is not None:
                return program, answer.values
    raise AssertionError("the base order itself is a solution of the last")


@pytest.mark.parametrize("seed", range(12))
def test_the_sequence_is_valid_costs_what_the_program_says_and_fits_at_the_cuts(solver, problems, seed):
    graph = problems.random_training(Random(seed), 8 + seed)
    base = plan_from_runs(graph, [op.name for op in graph.ops], "base").estimate.peak
    program, values = solved(solver, graph, base, 1 + seed % 4)
    runs = rounded_runs(program, values)
    estimate = simulate(graph, with_frees(graph, runs))
    value = program.rows.constant + sum(c * x for c, x in zip(program.rows.cost, values, strict=True))
    assert estimate.cost == pytest.approx(value * 1e-6 * graph.base_cost, rel=1e-6)
    resident = bytes_at_first_run(graph, runs)
    room = program.room + graph.input_bytes
    assert all(resident[graph.ops[cut].name] <= room for cut in program.cuts)


def test_the_op_runs_if_inverses_would_compute_a_tensor_from_itself():
    ops = (
        Op("c", ("x",), ("w",), 1.0),
        Op("a", ("x",), ("s",), 1.0),
        Op("b", ("s",), ("t",), 1.0),
        Op("end", ("s", "t", "w"), ("y",), 1.0),
    )
    inverses = (Op("b'", ("t",), ("s",), 1.0), Op("c'", ("w",), ("s",), 1.0))
    tensors = tuple(Tensor(t, 4) for t in ("x", "s", "t", "w", "y"))
    graph = TrainingGraph("loop", tensors, ("x",), ("y",), ops, inverses)
    order = precedence(graph)
    names = [op.name for op in order.recipes]
    program = CutProgram(graph, order, (names.index("end"),), 100, 0)

    def runs_where(*asked):
        values = [0.0] * len(program.rows.cost)
        for name in asked:
            if program.x[names.index(name), 0] >= 0:
                values[program.x[names.index(name), 0]] = 1.0
        return rounded_runs(program, values)

    runs = runs_where("c", "b", "b'")  # b reads what b' makes of what b writes
    assert {"a", "end"} <= set(runs)
    simulate(graph, with_frees(graph, runs))
    assert sorted(runs_where("c", "c'", "b")) == ["b", "c", "c'", "end"]


def test_the_search_returns_the_sequence_of_the_best_bound(problems):
    graph = problems.unet(3)
    budget = int(0.6 * plan_from_runs(graph, [op.name for op in graph.ops], "base").estimate.peak)
    search = BoundSearch(graph, budget)
    bound = search.run(Effort(3.0))
    estimate = plan_from_runs(graph, search.nearest, "nearest").estimate
    assert not math.isinf(bound.overhead)
    assert estimate.overhead == pytest.approx(bound.overhead, abs=1e-4)


def test_a_round_starts_from_the_suggested_sequence(problems):
    graph = problems.unet(3)
    budget = int(0.6 * plan_from_runs(graph, [op.name for op in graph.ops], "base").estimate.peak)
    good = Search(graph, budget)
    good.run((), Effort(moves=60_000))
    asked = []

    def suggest():
        asked.append(1)
        return [step.op for step in good.best.schedule if hasattr(step, "op")]

    short = Search(graph, budget, seed=3, suggest=suggest, suggested_to=(0,))
    short.run((), Effort(moves=400))
    assert asked
    assert short.best.estimate.cost <= good.best.estimate.cost
    nonsense = Search(graph, budget, seed=3, suggest=lambda: ["no such op"])
    nonsense.run((), Effort(moves=3000))
    assert nonsense.best is None or nonsense.best.estimate.peak <= budget
