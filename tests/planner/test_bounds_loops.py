"""The bound rules out tensors that are computed only from each other by inverses."""

from __future__ import annotations

import math

import pytest

from rematplan.ir import Op, Tensor, TrainingGraph
from rematplan.planner.arrays.precedence import precedence
from rematplan.planner.auto.exhaustive import exhaustive
from rematplan.planner.bounds import cut_bounds
from rematplan.planner.bounds.bound_search import BoundSearch, lower_bound
from rematplan.planner.bounds.loop_rows import pairs, violated
from rematplan.planner.bounds.multi_cut_program import CutProgram
from rematplan.planner.core.effort import Effort
from rematplan.planner.ilp.solver import Solver

Z = 12
"""Bytes of what runs between the join of the parts and the reading of all."""


def joined(parts: int) -> TrainingGraph:
    """Parts that are dear to make, cheap to join and to cut off again; something large runs before they are read."""
    names = tuple(f"a{k}" for k in range(parts))
    tensors = [Tensor("x", 1), *(Tensor(a, 2) for a in names), Tensor("y", 2 * parts)]
    tensors += [Tensor("s", 1), Tensor("z", Z), Tensor("g", 1), Tensor("out", 1)]
    ops = [Op(f"make_{a}", ("x",), (a,), 50.0) for a in names]
    ops += [
        Op("join", names, ("y",), 1.0),
        Op("small", ("y",), ("s",), 1.0),
        Op("large", ("s",), ("z",), 1.0),
    ]
    ops += [Op("back", ("z",), ("g",), 1.0), Op("read", ("g", "y", *names), ("out",), 1.0)]
    inverses = tuple(Op(f"cut_{a}", ("y",), (a,), 1.0) for a in names)
    return TrainingGraph("joined", tuple(tensors), ("x",), ("out",), tuple(ops), inverses)


def optimum(graph: TrainingGraph, budget: int) -> float:
    found = exhaustive(graph, budget)
    assert found is not None
    return found.cost / graph.base_cost - 1


@pytest.mark.parametrize("parts", [1, 2])
@pytest.mark.parametrize("seen", [True, False], ids=["given", "found"])
def test_the_bound_with_inverses_is_the_optimum(
    parts: int, seen: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    if not seen:
        monkeypatch.setattr(cut_bounds, "pairs", lambda *_: [])
    for kept in range(3):  # nothing fits between these budgets and z's working set but some of the parts
        budget, graph = Z + 2 + kept * parts, joined(parts)
        assert lower_bound(graph, budget).overhead == pytest.approx(optimum(graph, budget))
    assert optimum(joined(parts), Z + 2) > 0.9


def test_a_loop_in_a_solution_is_found_and_ruled_out() -> None:
    graph = joined(2)
    order, large = precedence(graph), 4
    assert pairs(graph, order) == [("a0", "y"), ("a1", "y")]
    with Solver() as solver:
        loose = CutProgram(graph, order, (large,), Z + 2, 0)
        answer = solver.solve(loose.rows, Effort(10), integer=True, gap=0.0)
        assert answer.values is not None
        assert violated(loose, answer.values) == [("a0", "a1", "y")]
        ruled_out = [("a0", "a1", "y"), *pairs(graph, order)]
        tight = CutProgram(graph, order, (large,), Z + 2, 0, ruled_out)
        answer = solver.solve(tight.rows, Effort(10), integer=True, gap=0.0)
        assert answer.values is not None
        assert violated(tight, answer.values) == []


def test_without_inverses_there_are_no_loops() -> None:
    graph = joined(1)
    plain = TrainingGraph("plain", graph.tensors, graph.inputs, graph.outputs, graph.ops)
    assert pairs(plain, precedence(plain)) == []
    search = BoundSearch(plain, Z + 2)
    assert math.isfinite(search.run(Effort(5)).overhead)
    assert not search.loops
