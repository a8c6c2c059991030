"""Lower sets, boundaries, cut points, and the contractions that keep their number small."""

from __future__ import annotations

import time
from random import Random

import networkx as nx
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from lower_set_boundary import boundary

from rematplan.ir import LatticeTooLarge, Op, Tensor, TrainingGraph
from rematplan.planner.arrays.indexed import indexed
from rematplan.planner.blocks.forward_graph import ForwardGraph, bits, forward_graph
from rematplan.planner.blocks.lower_sets import (
    blocks_of,
    boundaries,
    by_size,
    cut_points,
    lower_sets,
    pruned_lower_sets,
)

PROFILE = settings(max_examples=60, deadline=None, derandomize=True)


def is_lower_set(view: ForwardGraph, mask: int) -> bool:
    """Whether ``mask`` contains everything that must come before its nodes."""
    return all(view.before[v] & ~mask == 0 for v in bits(mask))


def random_view(rng: Random, nodes: int) -> ForwardGraph:
    """Any small directed acyclic graph as a forward graph, a few edges for order only."""
    preds, before = [], []
    for v in range(nodes):
        preds.append(sum(1 << u for u in range(v) if rng.random() < 0.35))
        before.append(preds[v] | sum(1 << u for u in range(v) if rng.random() < 0.05))
    succs = [sum(1 << w for w in range(nodes) if preds[w] >> v & 1) for v in range(nodes)]
    return ForwardGraph(
        members=tuple((v,) for v in range(nodes)),
        cost=tuple(float(rng.randint(0, 9)) for _ in range(nodes)),
        bytes=tuple(rng.randint(0, 50) for _ in range(nodes)),
        preds=tuple(preds),
        succs=tuple(succs),
        before=tuple(before),
    )


views = st.builds(
    lambda seed, nodes: random_view(Random(seed), nodes), st.integers(0, 10**9), st.integers(1, 8)
)


@PROFILE
@given(view=views)
def test_all_lower_sets_are_found_in_order_of_size(view):
    expected = by_size({mask for mask in range(1 << len(view)) if is_lower_set(view, mask)})
    assert lower_sets(view, 1 << 9, "x") == expected
    assert set(pruned_lower_sets(view, 100)) <= set(expected)
    assert len(pruned_lower_sets(view, 100)) <= len(view) + 2


@PROFILE
@given(view=views, most=st.integers(1, 6))
def test_a_thinned_family_keeps_the_empty_and_the_full_set(view, most):
    thinned = pruned_lower_sets(view, most)
    assert {0, view.everything} <= set(thinned) <= set(pruned_lower_sets(view, 100))
    assert len(thinned) <= max(most + 3, 2)


@PROFILE
@given(view=views, seed=st.integers(0, 10**9))
def test_boundaries_of_a_chain_are_the_union_of_each(view, seed):
    rng = Random(seed)
    chain: list[int] = []
    union = 0
    for mask in lower_sets(view, 1 << 9, "x")[1:]:
        if rng.random() < 0.4 and (not chain or chain[-1] & ~mask == 0):
            chain.append(mask)
            union |= boundary(view, mask)
    assert boundaries(view, chain) == union
    assert sum(blocks_of(chain)) == (chain[-1] if chain else 0)


@PROFILE
@given(view=views)
def test_cut_points_are_articulation_points_in_topological_order(view):
    graph = nx.Graph((u, v) for v in range(len(view)) for u in bits(view.preds[v]))
    graph.add_nodes_from(range(len(view)))
    cuts = cut_points(view)
    for below, mask in zip((0, *cuts), cuts, strict=False):
        assert below & ~mask == 0
        assert below != mask
        assert is_lower_set(view, mask)
        edge = list(bits(boundary(view, mask)))
        assert len(edge) == 1
        rest = graph.copy()
        rest.remove_node(edge[0])
        before = {v for v in bits(mask) if v != edge[0]}
        after = {v for v in range(len(view)) if not mask >> v & 1}
        assert not any(nx.has_path(rest, u, w) for u in before for w in after)


def test_cut_points_of_a_chain_are_all_inner_nodes(problems):
    view = forward_graph(problems.chain(20))
    assert len(cut_points(view)) == len(view) - 1


def test_a_wide_graph_is_refused_at_once(problems):
    view = forward_graph(problems.wide(60))
    started = time.process_time()
    with pytest.raises(
        LatticeTooLarge, match=r"more than 3000 lower sets \(3001 found so far\); try .*approx_dp"
    ):
        lower_sets(view, 3000, "exact_dp")
    assert time.process_time() - started < 2


@PROFILE
@given(seed=st.integers(0, 10**9), tape=st.booleans())
def test_contraction_covers_the_forward_without_cycles(problems, seed, tape):
    rng = Random(seed)
    graph = (
        problems.random_training(rng, rng.randint(0, 20))
        if tape
        else problems.scrambled(rng, rng.randint(0, 25))
    )
    view, ix = forward_graph(graph), indexed(graph)
    forward = [o for o, f in enumerate(ix.forward) if f]
    assert sorted(o for m in view.members for o in m) == forward
    node = {o: v for v, m in enumerate(view.members) for o in m}
    for o in forward:
        for p in {ix.producer[t] for t in ix.reads[o]} - {-1}:
            assert node[p] <= node[o]
            assert node[p] == node[o] or view.preds[node[o]] >> node[p] & 1
        if ix.after[o] >= 0:
            assert node[ix.after[o]] <= node[o]
            assert node[ix.after[o]] == node[o] or view.before[node[o]] >> node[ix.after[o]] & 1
    for v in range(len(view)):
        assert all(u < v for u in bits(view.before[v]))
        assert view.preds[v] & ~view.before[v] == 0
        assert all(view.preds[w] >> v & 1 for w in bits(view.succs[v]))
    assert sum(view.cost) == pytest.approx(sum(ix.cost[o] for o in forward))


def test_ops_that_depend_on_the_backward_do_not_belong_to_the_forward():
    tensors = tuple(Tensor(t, 1) for t in "abcd")
    ops = (
        Op("f", (), ("a",), 1.0, 0, "forward"),
        Op("b", ("a",), ("b",), 1.0, 0, "backward"),
        Op("late", ("b",), ("c",), 1.0, 0, "forward"),
        Op("early", (), ("d",), 1.0, 0, "forward"),
    )
    assert indexed(TrainingGraph("x", tensors, (), (), ops)).forward == (True, False, False, True)


@pytest.mark.parametrize(("shape", "most"), [("unet", 60), ("residual", 250), ("chain", 61)])
def test_lattices_of_known_shapes_stay_small(problems, shape, most):
    graph = {"unet": problems.unet, "residual": problems.residual, "chain": lambda: problems.chain(60)}[
        shape
    ]()
    assert len(lower_sets(forward_graph(graph), 10_000, "x")) <= most + 1
