"""Annealed plans with inverses are valid, as good as those of an exhaustive search, and never worse than plans
without inverses; the annealer's counts stay exact.
"""

from __future__ import annotations

import math
import random

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from rematplan.ir import Op, Tensor, TrainingGraph, problem_to_json
from rematplan.planner.annealing.anneal_loop import anneal
from rematplan.planner.annealing.annealer import Annealer
from rematplan.planner.annealing.state import COST, HALF, PENALTY
from rematplan.planner.auto.auto_strategy import Auto
from rematplan.planner.auto.exhaustive import exhaustive
from rematplan.planner.auto.min_budget_plan import cheapest_near_smallest_peak
from rematplan.planner.core.plan import plan_from_runs, plan_to_json
from rematplan.planner.strategies.anneal import Anneal

LAWS = settings(derandomize=True, deadline=None, max_examples=25)


def drawn(rng, most=9, inverses=3):
    """A random problem with random inverses: circles among them, writes of several ops, several writes."""
    tensors, ops, known = [Tensor("x", 3)], [], ["x"]
    for i in range(rng.randint(2, most)):
        reads = tuple(dict.fromkeys(rng.choice(known) for _ in range(rng.randint(0, 3))))
        writes = tuple(f"t{i}_{k}" for k in range(rng.choice([1, 1, 1, 2])))
        tensors += [Tensor(t, rng.randint(0, 9)) for t in writes]
        ops.append(Op(f"o{i}", reads, writes, float(rng.randint(0, 9)), rng.choice([0, 0, 4])))
        known += writes
    extra = []
    for i in range(rng.randint(1, inverses)):
        reads = tuple(dict.fromkeys(rng.choice(known) for _ in range(rng.randint(1, 2))))
        writes = tuple(dict.fromkeys(rng.choice(known[1:]) for _ in range(rng.choice([1, 1, 2]))))
        extra.append(Op(f"i{i}", reads, writes, float(rng.randint(0, 4)), rng.choice([0, 0, 3])))
    outputs = tuple(rng.sample(known, min(len(known), 3)))
    return TrainingGraph("drawn", tuple(tensors), ("x",), outputs, tuple(ops), tuple(extra))


def reversible(blocks, size=8, branch=3.0):
    """Additive couplings y = x₁ + F(x₂) in turn, and their gradient; each sum can be taken back."""
    ops, inverses, sizes = [], [], {"in0": size, "in1": size}
    a, b = "in0", "in1"
    undo = []
    for k in range(blocks):
        inner, f, y = f"h{k}", f"f{k}", f"y{k}"
        sizes |= {inner: 2 * size, f: size, y: size}
        ops += [
            Op(f"inner{k}", (b,), (inner,), branch, 0, "forward"),
            Op(f"outer{k}", (inner,), (f,), branch, 0, "forward"),
            Op(f"add{k}", (a, f), (y,), 1.0, 0, "forward"),
        ]
        if a not in ("in0", "in1"):
            inverses.append(Op(f"sub{k}", (y, f), (a,), 1.0))
        undo.append((k, inner, b))
        a, b = b, y
    sizes |= {"ga": size, "gb": size}
    ops.append(Op("loss", (a, b), ("gb", "ga"), 1.0, 0, "backward"))
    grad_b, grad_a = "gb", "ga"
    for k, inner, source in reversed(undo):
        sizes |= {f"gh{k}": 2 * size, f"gs{k}": size}
        ops += [
            Op(f"douter{k}", (grad_b, inner), (f"gh{k}",), 2 * branch, 0, "backward"),
            Op(f"dinner{k}", (f"gh{k}", source, grad_a), (f"gs{k}",), 2 * branch, 0, "backward"),
        ]
        grad_a, grad_b = grad_b, f"gs{k}"
    tensors = tuple(Tensor(t, n) for t, n in sizes.items())
    return TrainingGraph("reversible", tensors, ("in0", "in1"), (grad_a, grad_b), tuple(ops), tuple(inverses))


def without(graph):
    return TrainingGraph(graph.name, graph.tensors, graph.inputs, graph.outputs, graph.ops)


def base_of(graph):
    return [op.name for op in graph.ops]


def peak_of_base(graph):
    return plan_from_runs(graph, base_of(graph), "base").estimate.peak


@pytest.mark.parametrize("keep_order", [False, True])
@pytest.mark.parametrize("seed", range(30))
def test_the_state_is_exact_after_any_moves_with_inverses(seed, keep_order):
    rng = random.Random(seed)
    graph = drawn(rng, 20, 8)
    budget = int(peak_of_base(graph) * rng.uniform(0.5, 1))
    annealer = Annealer(graph, seed, keep_order)
    annealer.load(base_of(graph), budget)
    for _ in range(4):
        anneal(annealer.problem, annealer.state, 300, 5.0, 0.01, 0)
        kept = annealer.state
        annealer._reseat(annealer._sequence())  # counts everything anew
        assert np.array_equal(kept.mem[kept.at >= 0], annealer.state.mem[annealer.state.at >= 0])
        assert kept.value[PENALTY] == annealer.state.value[PENALTY]
        assert kept.value[COST] == pytest.approx(annealer.state.value[COST])
        plan = plan_from_runs(graph, annealer.current(), "now")  # the simulator refuses what is not served
        assert (plan.estimate.peak <= budget) == (annealer.penalty < HALF)
        assert annealer.accepts(annealer.current())


@LAWS
@given(st.integers(0, 10**6), st.floats(0.4, 1))
def test_anneal_and_auto_reach_the_exhaustive_optimum(seed, share):
    graph = drawn(random.Random(seed), 6)
    budget = int(share * peak_of_base(graph))
    optimum = exhaustive(graph, budget, 10**6)
    if optimum.cost < math.inf:
        for strategy in (Anneal(moves=40_000), Auto(moves=100_000)):
            plan = strategy.plan(graph, budget)
            assert plan.estimate.peak <= budget
            assert plan.estimate.cost == pytest.approx(optimum.cost)


def test_a_reversible_chain_is_inverted_block_by_block(checker):
    graph = reversible(12)
    budget = int(0.3 * peak_of_base(graph))
    plain = Auto(moves=100_000).plan(without(graph), budget)
    plan = Auto(moves=200_000).plan(graph, budget)
    replayed = checker.replay(problem_to_json(graph), plan_to_json(plan))
    assert replayed["peak"] == plan.estimate.peak <= budget
    assert replayed["inversions"] > 0
    assert plan.estimate.cost < plain.estimate.cost


def test_the_smallest_peak_is_no_larger_than_without_inverses():
    graph = reversible(6)
    plain = cheapest_near_smallest_peak(without(graph), moves=10_000)
    assert cheapest_near_smallest_peak(graph, moves=20_000).estimate.peak <= plain.estimate.peak


@pytest.mark.parametrize("share", [0.8, 0.6, 0.45])
def test_auto_is_never_worse_than_without_inverses(share):
    graph = reversible(12)
    budget = int(share * peak_of_base(graph))
    plain = Auto(moves=30_000).plan(without(graph), budget)
    assert Auto(moves=100_000).plan(graph, budget).estimate.cost <= plain.estimate.cost + 1e-9


def test_inverses_that_recover_nothing_are_left_out():
    graph = reversible(3)
    idle = (
        Op("reads its own", ("y0",), ("y0",), 1.0),
        Op("writes an input", ("y0",), ("in0",), 1.0),
        Op("to dead", ("y0",), ("dead",), 1.0),
    )
    sizes = (*graph.tensors, Tensor("dead", 1))
    ops = (*graph.ops, Op("dead", ("in0",), ("dead",), 1.0))
    wide = TrainingGraph("wide", sizes, graph.inputs, graph.outputs, ops, (*graph.inverses, *idle))
    names = {op.name for op in Annealer(wide).ops}
    assert {op.name for op in graph.inverses} <= names
    assert not names & {"dead", *(op.name for op in idle)}
