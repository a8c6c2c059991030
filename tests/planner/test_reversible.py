"""Inverses in the planner: recoverable tensors, valid plans, errors and anchors."""

from __future__ import annotations

import json
from dataclasses import replace
from random import Random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from rematplan.ir import Op, Tensor, TrainingGraph, UsageError
from rematplan.ir.problem_json import problem_from_json, problem_to_json
from rematplan.ir.recoverable import recoveries
from rematplan.planner.core.inversion_error import own_limit, predicted_errors, with_anchors, worst_error
from rematplan.planner.core.plan import plan_to_json
from rematplan.planner.core.schedule import Run, runs_of, with_frees
from rematplan.planner.strategies.reversible import Reversible
from rematplan.planner.strategies.store_all import no_recompute

SIZE, UNIT = 1000, 1e-8


def couplings(depth: int, gain: float = 1.0, ordinary: bool = False) -> TrainingGraph:
    """a, b = b, a + F(b) in turn, F of two ops, and their gradients; ``ordinary``: a = a + F(a) instead."""
    tensors, ops, inverses = [Tensor("x", SIZE)], [], []
    back: list[Op] = []

    def op(name: str, *reads: str, cost: float = 1.0) -> str:
        ops.append(Op(name, reads, (name,), cost, 0, "forward"))
        tensors.append(Tensor(name, SIZE))
        return name

    op("stem", "x")
    a, b = op("a", "stem"), op("b", "stem")
    for k in range(depth):
        of = a if ordinary else b
        h, f = op(f"h{k}", of, cost=10.0), ""
        f = op(f"f{k}", h, cost=10.0)
        y = op(f"y{k}", a, f)
        inverses.append(Op(f"invert{k}", (y, f), (a,), 1.0, 0, None, gain, UNIT * gain))
        inverses.append(Op(f"other{k}", (y, a), (f,), 1.0, 0, None, gain, UNIT * gain))
        back.append(Op(f"d{k}", ("g", of, h), (f"d{k}",), 20.0, 0, "backward"))
        tensors.append(Tensor(f"d{k}", 1))
        a, b = (y, b) if ordinary else (b, y)
    op("loss", a, b)
    end = [Op("g", ("loss", a, b), ("g",), 1.0, 0, "backward")]
    return TrainingGraph(
        "couplings",
        (*tensors, Tensor("g", 1)),
        ("x",),
        tuple(o.name for o in back),
        (*ops, *end, *reversed(back)),
        tuple(inverses),
    )


def test_the_activations_of_one_block_are_resident_at_any_depth(checker):
    peaks = []
    for depth in (2, 8, 40):
        graph = couplings(depth)
        curve = Reversible().curve(graph, ())
        peaks.append(curve[-1].estimate.peak - sum(graph.size[t] for t in graph.outputs))
        assert curve[0].estimate == no_recompute(graph).estimate
        for plan in curve:
            checker.replay(problem_to_json(graph), plan_to_json(plan))
        runs = runs_of(curve[-1].schedule)
        # one more evaluation of every F, shared between inversion and gradient
        assert all(runs.count(f"h{k}") == runs.count(f"f{k}") == 2 for k in range(1, depth * 7 // 8))
        assert max(map(runs.count, runs)) == 2
    assert peaks[0] == peaks[1] == peaks[2]


def test_an_ordinary_residual_chain_has_no_recovery():
    graph = couplings(6, ordinary=True)
    assert recoveries(graph) == {}
    assert Reversible().curve(graph, ())[-1].estimate == no_recompute(graph).estimate


def test_a_tensor_is_not_recovered_if_the_inverse_lacks_its_inputs():
    graph = couplings(4)
    assert len(recoveries(graph)) == 4
    once = replace(graph, never_rerun=tuple(o.name for o in graph.ops if o.name.startswith("f")))
    assert recoveries(once) == {}


@pytest.mark.parametrize("gain", [1.0, 2.0])
def test_errors_grow_with_the_chain_and_anchors_cut_it(gain):
    graph = couplings(20, gain)
    plan = Reversible().curve(graph, ())[-1]
    errors = predicted_errors(graph, plan.schedule)
    assert errors["b"] == worst_error(graph, plan.schedule) > errors["y15"] > 0
    assert errors["b"] > (UNIT * gain**18 if gain > 1 else 15 * UNIT)
    for limit in (40 * UNIT, 5 * UNIT):
        kept = with_anchors(graph, limit)
        anchored = Reversible().curve(kept, ())[-1]
        assert worst_error(kept, anchored.schedule) <= limit
    assert anchored.estimate.peak > plan.estimate.peak
    assert with_anchors(graph, UNIT / 2).inverses == ()
    with pytest.raises(UsageError, match="must be positive"):
        with_anchors(graph, 0.0)
    unit = 2.0**-24
    assert own_limit(replace(graph.inverses[0], gain=1.0, noise=0.15 * unit)) == pytest.approx(
        unit ** (2 / 3)
    )


def test_exact_inverses_carry_errors_and_add_none():
    graph = couplings(3)
    exact = replace(graph, inverses=tuple(replace(i, gain=1.0, noise=0.0) for i in graph.inverses))
    plan = Reversible().curve(exact, ())[-1]
    assert any(isinstance(s, Run) and s.op.startswith("invert") for s in plan.schedule)
    assert worst_error(exact, plan.schedule) == 0
    assert with_anchors(exact, 1e-30) is exact
    assert problem_from_json(json.loads(json.dumps(problem_to_json(graph)))) == graph


def test_rounding_to_a_coarser_type_makes_errors_larger():
    ops = (
        Op("x", (), ("x",), 1.0),
        Op("y", ("x",), ("y",), 1.0),
        Op("low", ("y",), ("low",), 1.0, noise=1e-2),
    )
    back = Op("back", ("y",), ("x",), 1.0, noise=1e-8)
    graph = TrainingGraph("casts", tuple(Tensor(o.name, 1) for o in ops), (), ("low",), ops, (back,))
    runs = ["x", "y", "back", "y", "low"]
    errors = predicted_errors(graph, with_frees(graph, runs))
    assert errors["x"] == errors["y"] == 1e-8
    assert errors["low"] == pytest.approx(1e-5)


@settings(derandomize=True, max_examples=60, deadline=None)
@given(st.integers(0, 10**6))
def test_plans_are_valid_with_any_inverses(problems, checker, seed):
    rng = Random(seed)
    graph = problems.random_training(rng, rng.randint(3, 14))
    made = [t for o in graph.ops if o.phase == "forward" for t in o.writes]
    later = [t for o in graph.ops for t in o.writes if o.phase == "forward"]
    inverses = []
    for k in range(rng.randint(1, 12)):
        target = rng.choice(made)
        reads = tuple(rng.sample([t for t in later if t != target], min(2, len(later) - 1)))
        inverses.append(Op(f"inverse{k}", reads, (target,), 1.0, 0, None, 1.5, 1e-7))
    graph = replace(graph, inverses=tuple(inverses))
    for one in (graph, with_anchors(graph, 2e-7)):
        for plan in Reversible(shares=3).curve(one, ()):
            checker.replay(problem_to_json(one), plan_to_json(plan))
            if one is not graph:
                assert worst_error(one, plan.schedule) <= 2e-7 * 1.01
