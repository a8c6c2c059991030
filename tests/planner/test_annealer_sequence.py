"""The annealer's counts equal a count from scratch after any moves, and its sequences are valid plans."""

from __future__ import annotations

import math
import random

import numpy as np
import pytest

from rematplan.ir import Op, Tensor, TrainingGraph
from rematplan.planner.annealing.anneal_loop import anneal
from rematplan.planner.annealing.annealer import Annealer
from rematplan.planner.annealing.state import COST, HALF, NEARBY, PENALTY
from rematplan.planner.arrays.precedence import needed_ops
from rematplan.planner.core.plan import plan_from_runs


def drawn(rng, most=25):
    """A random problem: several writes an op, workspaces, ops that draw random numbers, any outputs."""
    tensors, ops, known = [Tensor("x", 3)], [], ["x"]
    for i in range(rng.randint(1, most)):
        reads = tuple(dict.fromkeys(rng.choice(known) for _ in range(rng.randint(0, 3))))
        writes = tuple(f"t{i}_{k}" for k in range(rng.choice([1, 1, 1, 2, 3])))
        tensors += [Tensor(t, rng.randint(0, 9)) for t in writes]
        ops.append(Op(f"o{i}", reads, writes, float(rng.randint(0, 5)), rng.choice([0, 0, 4])))
        known += writes
    outputs = tuple(rng.sample(known, min(len(known), 3)))
    ordered = tuple(o.name for o in ops if rng.random() < 0.3)
    return TrainingGraph("drawn", tuple(tensors), ("x",), outputs, tuple(ops), ordered=ordered)


def base_of(graph):
    return [op.name for op in graph.ops]


@pytest.mark.parametrize("times", [1, 3 * NEARBY])  # how often each op runs at first
@pytest.mark.parametrize("seed", range(20))
def test_the_state_is_exact_after_any_moves(seed, times):
    rng = random.Random(seed)
    graph = drawn(rng)
    budget = int(plan_from_runs(graph, base_of(graph), "base").estimate.peak * rng.uniform(0.5, 1))
    annealer = Annealer(graph, seed)
    annealer.load(base_of(graph) * times, budget)
    for _ in range(4):
        anneal(annealer.problem, annealer.state, 300, 1.0, 0.01, 0)
        kept = annealer.state
        annealer._reseat(annealer._sequence())  # counts everything anew
        assert np.array_equal(kept.mem[kept.at >= 0], annealer.state.mem[annealer.state.at >= 0])
        assert kept.value[PENALTY] == annealer.state.value[PENALTY]
        assert kept.value[COST] == pytest.approx(annealer.state.value[COST])
        plan = plan_from_runs(graph, annealer.current(), "now")
        assert plan.estimate.peak == annealer.peak
        assert (plan.estimate.peak <= budget) == (annealer.penalty < HALF)


@pytest.mark.parametrize("keep_order", [False, True])
@pytest.mark.parametrize("seed", range(12))
def test_first_runs_keep_the_order_that_must_be_kept(seed, keep_order):
    rng = random.Random(100 + seed)
    graph = drawn(rng)
    annealer = Annealer(graph, seed, keep_order)
    annealer.load(base_of(graph), plan_from_runs(graph, base_of(graph), "base").estimate.peak * 2 // 3)
    annealer.cool(3000, 1.0, 0.1)
    runs = annealer.current()
    kept = needed_ops(graph) if keep_order else [graph.op[name] for name in graph.ordered]
    base = sorted((op.name for op in kept), key=base_of(graph).index)
    assert [runs.index(name) for name in base] == sorted(runs.index(name) for name in base)
    assert {op.name for op in needed_ops(graph)} <= set(runs)


def test_ops_that_no_output_needs_are_left_out():
    tensors = tuple(Tensor(t, 1) for t in "abc")
    ops = (
        Op("a", (), ("a",), 1.0),
        Op("b", ("a",), ("b",), 1.0),
        Op("c", ("a",), ("c",), 1.0),
        Op("d", ("c",), (), 1.0),
    )
    graph = TrainingGraph("g", tensors, (), ("b",), ops[:3])
    assert [op.name for op in needed_ops(graph)] == ["a", "b"]
    effects = TrainingGraph("g", tensors, (), ("b",), ops)
    assert [op.name for op in needed_ops(effects)] == ["a", "b", "c", "d"]


def test_starts_that_miss_an_op_or_break_the_order_are_refused():
    tensors = tuple(Tensor(t, 1) for t in "ab")
    ops = (Op("a", (), ("a",), 1.0), Op("b", (), ("b",), 1.0))
    graph = TrainingGraph("g", tensors, (), ("a", "b"), ops, ordered=("a", "b"))
    annealer = Annealer(graph)
    assert annealer.accepts(["a", "b"])
    assert annealer.accepts(["a", "b", "a"])
    assert not annealer.accepts(["b", "a"])
    assert not annealer.accepts(["a"])


def test_sizes_near_the_limit_of_64_bits_are_counted_safely():
    huge = 2**61
    tensors = (Tensor("a", huge), Tensor("b", huge), Tensor("c", 1))
    ops = (Op("a", (), ("a",), 1.0), Op("b", ("a",), ("b",), 1.0, huge), Op("c", ("b",), ("c",), 1.0))
    graph = TrainingGraph("huge", tensors, (), ("c",), ops)
    annealer = Annealer(graph)
    peak = plan_from_runs(graph, base_of(graph), "base").estimate.peak
    assert peak == 3 * huge
    annealer.load(base_of(graph), peak + 2 * annealer.unit)
    assert annealer.feasible
    annealer.load(base_of(graph), peak - 2 * annealer.unit)
    assert not annealer.feasible


def test_the_price_of_a_byte_stays_below_its_limit():
    graph = drawn(random.Random(3))
    annealer = Annealer(graph)
    annealer.load(base_of(graph), graph.input_bytes)  # which nothing fits, so that the price would rise
    annealer.limit_price(0.01)
    annealer.cool(5000, 0.1, 0.01)
    assert 0 < annealer.price <= 0.01
    annealer.limit_price(math.inf)
    annealer.cool(5000, 0.1, 0.01)
    assert annealer.price > 0.01


def test_the_price_of_a_byte_grows_no_faster_than_it_may():
    graph = drawn(random.Random(3))
    annealer = Annealer(graph)
    annealer.load(base_of(graph), graph.input_bytes)  # which nothing fits, so that the price would rise
    first = annealer.price
    annealer.limit_growth(1.0001)
    annealer.cool(5000, 0.1, 0.1)
    assert first < annealer.price <= first * 1.0001**5000 * (1 + 1e-9)
    slow = annealer.price
    annealer.limit_growth(math.inf)
    annealer.cool(5000, 0.1, 0.1)
    assert annealer.price > slow * 1.0001**5000
