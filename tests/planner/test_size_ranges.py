"""A range is proven at every size of it, and problems between captured sizes are exact or refused."""

from __future__ import annotations

from dataclasses import replace
from random import Random

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from rematplan.ir import ProblemError, TrainingGraph
from rematplan.planner.core.schedule import runs_of, with_frees
from rematplan.planner.core.simulator import simulate
from rematplan.planner.family.amounts_by_position import amounts_of
from rematplan.planner.family.interpolated_problems import CHECKS, between
from rematplan.planner.family.plan_family import PlanFamily
from rematplan.planner.family.range_proof import RangeProof, range_row
from rematplan.planner.family.tensor_positions import tensor_positions
from rematplan.planner.strategies.approx_dp import ApproxDP
from rematplan.planner.strategies.store_all import no_recompute

PROFILE = settings(max_examples=40, deadline=None, derandomize=True)


def family_of(graph: TrainingGraph) -> PlanFamily:
    family = PlanFamily(graph)
    for plan in ApproxDP().curve(graph, ()):
        family.add(graph, plan)
    return family


def sized(graph: TrainingGraph, rng: Random):
    """A function from sizes to problems: tensors' bytes are polynomials of the size, costs parabolas in the bytes
    that ops move, workspaces grow in steps."""
    terms = [
        (rng.randint(0, 99), rng.randint(0, 99), rng.choice((0, rng.randint(0, 9)))) for _ in graph.tensors
    ]
    laws = [(rng.randint(0, 3), *(rng.random() for _ in range(3))) for _ in graph.ops]

    def at(size: int) -> TrainingGraph:
        tensors = [
            replace(t, bytes=c + b * size + a * size * size)
            for t, (c, b, a) in zip(graph.tensors, terms, strict=True)
        ]
        bare = replace(graph, tensors=tuple(tensors))
        traffic = tensor_positions(bare).traffic(np.array([t.bytes for t in bare.tensors]))
        ops = [
            replace(op, workspace=int(k * (n // 50)), cost=c + d * n + e * n * n)
            for op, (k, c, d, e), n in zip(graph.ops, laws, traffic.tolist(), strict=True)
        ]
        return replace(bare, ops=tuple(ops))

    return at


@PROFILE
@given(seed=st.integers(0, 10**9), share=st.floats(0.2, 1.1))
def test_a_proof_is_what_the_simulator_says_at_each_size(problems, seed, share):
    rng = Random(seed)
    graph = problems.random_training(rng, 5)
    at, family = sized(graph, rng), family_of(graph)
    sizes = range(1, 9)
    budget = int(share * no_recompute(at(8)).estimate.peak)
    rows = (range_row(family, amounts_of(at(size)), size, budget) for size in sizes)
    proof = RangeProof(budget, tuple(rows))
    assert [row.size for row in proof.rows] == list(sizes)
    for row in proof.rows:
        here = at(row.size)
        there = [simulate(here, family.plan(here, m).schedule) for m in family.members]
        plan = family.plan(here, row.member)
        assert plan.estimate == row.estimate == simulate(here, plan.schedule)
        assert row.base_peak == no_recompute(here).estimate.peak
        fitting = [e.cost for e in there if e.peak <= budget]
        assert row.fits is bool(fitting) is (row.size not in proof.unfit)
        assert row.estimate.cost == pytest.approx(min(fitting)) if fitting else True
        assert row.fits or row.estimate.peak == min(e.peak for e in there) > budget
    assert proof.holds is (not proof.unfit)


def test_a_size_in_the_midst_that_does_not_fit_is_named(problems):
    graph = problems.chain(6)
    heavy = replace(graph, ops=(replace(graph.ops[0], workspace=10**9), *graph.ops[1:]))
    family = family_of(graph)
    budget = no_recompute(graph).estimate.peak
    amounts = {n: amounts_of(heavy if n == 5 else graph) for n in range(1, 9)}
    proof = RangeProof(budget, tuple(range_row(family, amounts[n], n, budget) for n in amounts))
    assert proof.unfit == (5,)
    assert not proof.holds
    assert proof.rows[4].estimate.peak > 10**9


@PROFILE
@given(seed=st.integers(0, 10**9))
def test_between_captured_sizes_bytes_are_exact(problems, seed):
    rng = Random(seed)
    at = sized(problems.random_training(rng, 4), rng)
    known = between({size: at(size) for size in (2, 3, 10, 17, 24, 31, 32)})
    assert known is not None
    for size in range(2, 33):
        made, true = known.problem(size), at(size)
        assert size in known.captured or known.amounts(size).equals(amounts_of(made))
        assert made.tensors == true.tensors
        assert made.structure == true.structure
        for a, b in zip(made.ops, true.ops, strict=True):
            assert (a.name, a.reads, a.writes) == (b.name, b.reads, b.writes)
            assert a.cost == pytest.approx(b.cost)
            assert b.workspace <= a.workspace
        plan = no_recompute(true)
        assert simulate(made, with_frees(made, runs_of(plan.schedule))).peak >= plan.estimate.peak


def test_rounded_bytes_are_refused(problems):
    graph = problems.chain(4)

    def at(size: int) -> TrainingGraph:
        return replace(graph, tensors=tuple(replace(t, bytes=8 * -(-size // 8)) for t in graph.tensors))

    assert between({size: at(size) for size in (2, 3, 10, 17, 24, 31, 32)}) is None
    assert between({size: at(size) for size in (8, 16, 24, 32, 40)}) is not None


def test_three_sizes_suffice_for_lines_and_squares(problems):
    graph = problems.chain(4)

    def at(size: int) -> TrainingGraph:
        tensors = (replace(t, bytes=8 + 4 * size ** (1 + k % 2)) for k, t in enumerate(graph.tensors))
        return replace(graph, tensors=tuple(tensors))

    known = between({size: at(size) for size in (3, 8, 15)})
    assert known is not None
    assert all(known.problem(size) == at(size) for size in range(3, 16))
    assert between({size: at(size) for size in (3, 15)}) is None


def test_too_few_sizes_or_other_ops_say_nothing(problems):
    rng = Random(1)
    at = sized(problems.chain(4), rng)
    sizes = list(range(2, 5 + CHECKS))
    assert between({size: at(size) for size in sizes}) is not None
    assert between({size: at(size) for size in sizes[:-1]}) is None
    other = sized(problems.chain(5), rng)
    assert between({size: (other if size == 3 else at)(size) for size in sizes}) is None
    known = between({size: at(size) for size in sizes})
    with pytest.raises(ProblemError, match="is not between 2 and"):
        known.problem(1)


def test_the_bytes_that_ops_and_inverses_read_and_write(problems):
    graph = problems.chain(3)
    op = graph.ops[0]
    graph = replace(graph, inverses=(replace(op, name="i", reads=op.writes, writes=(), workspace=77),))
    found = tensor_positions(graph).traffic(np.array([t.bytes for t in graph.tensors]))
    recipes = (*graph.ops, *graph.inverses)
    assert found.tolist() == [sum(graph.size[t] for t in (*r.reads, *r.writes)) for r in recipes]
