"""Moves for problems without phases give valid sequences with exact counts and exact prices of removals."""

from __future__ import annotations

import math
import random

import numpy as np
import pytest

from rematplan.ir import Op, Tensor, TrainingGraph
from rematplan.planner.annealing.annealer import Annealer
from rematplan.planner.annealing.annealing_search import Search
from rematplan.planner.annealing.edits import commit, do_remove
from rematplan.planner.annealing.plain_dag_moves import drop_with_siblings, removal, remove_run
from rematplan.planner.annealing.state import COST, PENALTY, PRICE
from rematplan.planner.arrays.precedence import needed_ops
from rematplan.planner.caches.numba_kernels import kernel
from rematplan.planner.core.effort import Effort
from rematplan.planner.core.plan import plan_from_runs


@kernel
def drop_at(P, S, slot, allowed):
    done = drop_with_siblings(P, S, slot, allowed)
    commit(S)
    return done


@kernel
def remove_any(P, S, allowed):
    done = remove_run(P, S, allowed)
    commit(S)
    return done


@kernel
def remove_it(P, S, node):
    do_remove(P, S, node)
    commit(S)


@kernel
def price_of_removal(P, S, node):
    return removal(P, S, node)


def drawn(rng, ops=25):
    """A random problem: ops that read and write several tensors, workspaces, some that draw random numbers."""
    tensors, made, known = [], [], []
    for i in range(ops):
        reads = tuple(rng.sample(known, min(len(known), rng.randint(0, 4))))
        writes = tuple(f"t{i}_{k}" for k in range(rng.choice([1, 1, 2])))
        tensors += [Tensor(t, rng.randint(0, 9)) for t in writes]
        made.append(Op(f"o{i}", reads, writes, float(rng.randint(0, 5)), rng.choice([0, 0, 4])))
        known += writes
    ordered = tuple(op.name for op in made if rng.random() < 0.2)
    return TrainingGraph(
        "drawn", tuple(tensors), (), tuple(rng.sample(known, 3)), tuple(made), ordered=ordered
    )


def loaded(graph, seed, share):
    base = [op.name for op in needed_ops(graph)]
    annealer = Annealer(graph, seed)
    annealer.load(base, int(share * plan_from_runs(graph, base, "base").estimate.peak), 1.0)
    return annealer


@pytest.mark.parametrize("seed", range(25))
def test_any_drops_and_removals_give_a_valid_sequence_with_exact_counts(seed):
    rng = random.Random(seed)
    graph = drawn(rng)
    annealer = loaded(graph, seed, rng.uniform(0.5, 1))
    done = 0
    for _ in range(60):
        state = annealer.state
        done += drop_at(
            annealer.problem, state, rng.randrange(state.at.size), rng.choice([0.0, 5.0, math.inf])
        )
        remove_any(annealer.problem, state, rng.choice([0.0, 5.0, math.inf]))
        annealer._reseat(annealer._sequence())  # counts everything anew
        assert np.array_equal(state.mem[state.at >= 0], annealer.state.mem[annealer.state.at >= 0])
        assert state.value[PENALTY] == annealer.state.value[PENALTY]
        assert state.value[COST] == pytest.approx(annealer.state.value[COST])
        assert annealer.accepts(annealer.current())
    assert done


@pytest.mark.parametrize("seed", range(10))
def test_the_price_of_a_removal_is_exact_if_an_op_reads_nothing(seed):
    """Random sequences of sources, run again and again, and of their readers."""
    rng = random.Random(seed)
    sources = [Op(f"s{i}", (), (f"t{i}",), float(rng.randint(1, 9))) for i in range(6)]
    readers = [
        Op(f"r{i}", tuple(rng.sample([f"t{k}" for k in range(6)], 2)), (f"u{i}",), 1.0) for i in range(9)
    ]
    sizes = {op.writes[0]: rng.randint(1, 20) for op in (*sources, *readers)}
    outputs = tuple(f"u{i}" for i in range(9))
    graph = TrainingGraph(
        "sources", tuple(Tensor(t, n) for t, n in sizes.items()), (), outputs, (*sources, *readers)
    )
    runs = [op.name for op in sources]
    for op in readers:
        runs += [f"s{rng.randrange(6)}", op.name]
    annealer = Annealer(graph)
    annealer.load(runs, int(0.8 * plan_from_runs(graph, runs, "runs").estimate.peak), 1.0)
    state, checked = annealer.state, 0
    for node in state.at[state.at >= 0]:
        op = state.op[node]
        if op < 6 and state.links.prev[node] >= 0 and state.links.slot[node] >= 0:
            expected = price_of_removal(annealer.problem, state, node)
            before = state.value[COST] + state.value[PRICE] * state.value[PENALTY]
            remove_it(annealer.problem, state, node)
            after = state.value[COST] + state.value[PRICE] * state.value[PENALTY]
            assert after - before == pytest.approx(expected)
            checked += 1
    assert checked >= 5


def test_drops_that_gain_only_together_are_found():
    """Five tensors can be made again from one large input: holding that pays for all five, for none alone."""
    parts = [f"p{i}" for i in range(5)]
    ops = [Op("root", (), ("root",), 100.0)]
    ops += [Op(p, ("root",), (p,), 1.0) for p in parts]
    ops += [Op("wide", ("p0",), ("wide",), 1.0)]
    ops += [Op("end", ("wide", *parts), ("end",), 1.0)]
    sizes = {"root": 15, "wide": 80, "end": 1, **dict.fromkeys(parts, 10)}
    graph = TrainingGraph("together", tuple(Tensor(t, n) for t, n in sizes.items()), (), ("end",), tuple(ops))
    # "wide" runs beside p0 and either the root or the four others
    search = Search(graph, 131)
    plan = search.run([], Effort(moves=20_000))
    assert plan is not None
    assert plan.estimate.peak <= 131


@pytest.mark.parametrize("keep_order", [False, True])
def test_searches_with_equal_numbers_of_moves_are_equal(keep_order):
    graph = drawn(random.Random(5), ops=60)
    base = [op.name for op in needed_ops(graph)]
    budget = int(0.75 * plan_from_runs(graph, base, "base").estimate.peak)
    plans = [Search(graph, budget, 7, keep_order).run([], Effort(moves=15_000)) for _ in range(2)]
    assert plans[0] == plans[1]
