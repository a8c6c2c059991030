"""The dynamic program over lower sets equals brute force over all partitions, under the paper's cost formula."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from itertools import islice
from random import Random

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from lower_set_boundary import boundary

from rematplan.planner.blocks import lower_set_dp
from rematplan.planner.blocks.forward_graph import ForwardGraph, bits
from rematplan.planner.blocks.lower_set_dp import prepare
from rematplan.planner.blocks.lower_sets import lower_sets, pruned_lower_sets

PROFILE = settings(max_examples=80, deadline=None, derandomize=True)
TICKS = 400  # more than any total below, so that integer costs are exact


def random_view(rng: Random, nodes: int) -> ForwardGraph:
    preds = [sum(1 << u for u in range(v) if rng.random() < 0.5) for v in range(nodes)]
    succs = [sum(1 << w for w in range(nodes) if preds[w] >> v & 1) for v in range(nodes)]
    return ForwardGraph(
        members=tuple((v,) for v in range(nodes)),
        cost=tuple(float(rng.randint(0, 9)) for _ in range(nodes)),
        bytes=tuple(rng.choice([0, 1, 7, 50, 1000]) for _ in range(nodes)),
        preds=tuple(preds),
        succs=tuple(succs),
        before=tuple(preds),
    )


def transient(view: ForwardGraph, mask: int) -> int:
    """Return M(δ⁺(L) ∖ L) + M(δ⁻(δ⁺(L)) ∖ L): what the peak formula charges in addition to a block."""
    after = 0
    for v in bits(mask):
        after |= view.succs[v]
    before = 0
    for v in bits(after):
        before |= view.preds[v]
    return sum(view.bytes[v] for part in (after, before) for v in bits(part & ~mask))


views = st.builds(
    lambda seed, nodes: random_view(Random(seed), nodes), st.integers(0, 10**9), st.integers(1, 8)
)


MOST_CHAINS = 5000


def all_chains(masks: tuple[int, ...]) -> Iterator[tuple[int, ...]]:
    """Every chain of a family that ends in V, ∅ left out."""
    stack: list[tuple[int, ...]] = [(masks[-1],)]
    while stack:
        chain = stack.pop()
        yield chain
        stack += [(m, *chain) for m in masks if m and m != chain[0] and m & ~chain[0] == 0]


def listable(rng: Random, nodes: int) -> tuple[ForwardGraph, list[tuple[int, ...]]]:
    """A graph of at most ``nodes`` nodes, with fewer if it has too many partitions to list, and its
    partitions."""
    while True:
        view = random_view(rng, nodes)
        chains = list(islice(all_chains(lower_sets(view, 300, "x")), MOST_CHAINS + 1))
        if len(chains) <= MOST_CHAINS:
            return view, chains
        nodes -= 1


def formula(view: ForwardGraph, chain: tuple[int, ...], charge_last: bool = True) -> tuple[int, float]:
    """The peak (bytes) and the cost of recomputation by the paper's sums over sets, without the code under test."""
    size, edges = view.bytes, [(u, v) for v in range(len(view)) for u in bits(view.preds[v])]
    peak, time, cached, below = 0, 0.0, set(), set()
    for mask in chain:
        inside = set(bits(mask))
        block = inside - below
        edge = {u for u, v in edges if u in inside and v not in inside}
        after = {v for u, v in edges if u in inside}
        before = {u for u, v in edges if v in after}
        stage = sum(size[v] for v in cached) + 2 * sum(size[v] for v in block)
        stage += sum(size[v] for v in after - inside) + sum(size[v] for v in before - inside)
        peak = max(peak, stage)
        if charge_last or mask != chain[-1]:
            time += sum(view.cost[v] for v in block - edge)
        cached |= edge
        below = inside
    return peak, time


@PROFILE
@given(seed=st.integers(0, 10**9), nodes=st.integers(1, 8), charge_last=st.booleans(), share=st.floats(0, 1))
def test_exact_dp_equals_brute_force(seed, nodes, charge_last, share):
    view, listed = listable(Random(seed), nodes)
    masks = lower_sets(view, 300, "x")
    chains = {chain: formula(view, chain, charge_last) for chain in listed}
    dp = prepare(view, masks, TICKS, charge_last)
    least = min(peak for peak, _ in chains.values())
    assert dp.least_budget() == least
    assert dp.most_budget() >= max(peak for peak, _ in chains.values())
    for budget in (least - 1, least, round(least + share * (dp.most_budget() - least))):
        feasible = {chain: time for chain, (peak, time) in chains.items() if peak <= budget}
        table = dp.solve(budget)
        times = table.times()
        assert bool(times) == bool(feasible)
        if feasible:
            assert times[0] == min(feasible.values())  # time-centric
            assert times[-1] == max(feasible.values())  # memory-centric
        for t in times:
            assert feasible[table.chain(t)] == t


@pytest.mark.parametrize("unit", [1, 2**40])
def test_the_number_of_passes_for_the_smallest_budget_does_not_grow_with_sizes(unit, monkeypatch):
    view = random_view(Random(5), 8)
    view = replace(view, bytes=tuple(unit * size for size in view.bytes))
    dp, pass_, passes = prepare(view, lower_sets(view, 300, "x"), TICKS, True), lower_set_dp._asked, []
    monkeypatch.setattr(lower_set_dp, "_asked", lambda *args: passes.append(pass_(*args)) or passes[-1])
    assert dp.least_budget() > 0
    assert len(passes) < 10


@PROFILE
@given(view=views, share=st.floats(0, 1))
def test_approx_is_never_better_than_exact(view, share):
    exact = prepare(view, lower_sets(view, 300, "x"), TICKS, True)
    approx = prepare(view, pruned_lower_sets(view, 300), TICKS, True)
    assert approx.least_budget() >= exact.least_budget()
    budget = round(exact.least_budget() + share * (exact.most_budget() - exact.least_budget()))
    from_exact, from_approx = exact.solve(budget).times(), approx.solve(budget).times()
    if from_approx:
        assert from_exact[0] <= from_approx[0]
        assert from_exact[-1] >= from_approx[-1]


@PROFILE
@given(view=views, seed=st.integers(0, 10**9), ticks=st.integers(1, 30))
def test_rounding_adds_less_than_one_tick_per_block(view, seed, ticks):
    rng = Random(seed)
    view = ForwardGraph(
        view.members,
        tuple(rng.uniform(0.1, 9) for _ in view.cost),
        view.bytes,
        view.preds,
        view.succs,
        view.before,
    )
    dp = prepare(view, lower_sets(view, 300, "x"), ticks, True)
    table = dp.solve(dp.most_budget())
    tick = sum(view.cost) / ticks
    for t in table.times():
        chain = table.chain(t)
        time = formula(view, chain)[1]
        assert time <= t * tick * (1 + 1e-9)
        assert t * tick * (1 - 1e-2) <= time + len(chain) * tick * (1 + 1e-9)


@PROFILE
@given(view=views)
def test_the_arrays_of_a_family_equal_their_definitions(view):
    masks = lower_sets(view, 300, "x")
    family = prepare(view, masks, TICKS, True).family
    for i, mask in enumerate(masks):
        assert family.bytes[i] == sum(view.bytes[v] for v in bits(mask))
        assert family.time[i] == sum(view.cost[v] for v in bits(mask))
        assert family.transient[i] == transient(view, mask)
        edge = family.edge[family.edge_start[i] : family.edge_start[i + 1]]
        assert list(edge) == list(bits(boundary(view, mask)))
    assert np.all(prepare(view, masks, TICKS, True, gradients=False).family.transient == 0)


def test_problems_of_more_than_64_nodes_are_solved():
    """Masks of several words: on a chain every pair of lower sets is a transition."""
    nodes = 150
    preds = tuple((1 << v) >> 1 for v in range(nodes))
    succs = tuple(1 << (v + 1) if v + 1 < nodes else 0 for v in range(nodes))
    view = ForwardGraph(tuple((v,) for v in range(nodes)), (1.0,) * nodes, (1,) * nodes, preds, succs, preds)
    dp = prepare(view, lower_sets(view, 1000, "x"), nodes, True)
    for budget in (dp.least_budget(), 60, 150, dp.most_budget()):
        for t in (dp.solve(budget).times()[0], dp.solve(budget).times()[-1]):
            chain = dp.solve(budget).chain(t)
            peak, time = formula(view, chain)
            assert peak <= budget
            assert time == t
    # Block i, with i boundaries cached, may hold (B − i)/2 nodes; over i < B these sum to B²/4 = n.
    assert dp.least_budget() == pytest.approx(2 * nodes**0.5, abs=3)


def test_a_ticks_entry_without_a_chain_is_refused() -> None:
    view = random_view(Random(1), 4)
    masks = lower_sets(view, 300, "x")
    table = prepare(view, masks, TICKS, charge_last=True).solve(10**9)
    wrong = replace(table, opt=table.opt + np.arange(len(masks))[:, None])
    with pytest.raises(ValueError, match="no such chain"):
        wrong.chain(table.times()[0])
