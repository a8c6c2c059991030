"""What a search back in time proves never exceeds the optimum, whichever tensors it tracks."""

from __future__ import annotations

from dataclasses import replace
from unittest import mock

import pytest
from hypothesis import given
from hypothesis import strategies as st
from test_bounds import LAWS, chain, graphs, least_peak, optimum

from rematplan.ir import Op, Tensor, TrainingGraph
from rematplan.planner.arrays.precedence import precedence
from rematplan.planner.bounds import tail_search
from rematplan.planner.bounds.bound_search import BoundSearch
from rematplan.planner.bounds.tail_search import TailSearch, highest_proven
from rematplan.planner.core.effort import Effort

ENOUGH = 10**6


def searches(graph, budget, chosen):
    """A search over each chain of needed ops that the bits of ``chosen`` pick, from its first op on."""
    order, cuts = precedence(graph), []
    for op in range(len(graph.ops)):
        if order.needed >> op & 1 and chosen >> op & 1 and (not cuts or order.before[op] >> cuts[-1] & 1):
            cuts.append(op)
    for at, first in enumerate(cuts):
        yield TailSearch(graph, order, cuts[at:], first, budget)


@st.composite
def training_steps(draw):
    """A forward chain with skips, and its backward ops, most of which also write a small output, like the gradients of
    weights."""
    sizes, costs = st.integers(4, 9), st.integers(1, 4)
    length = draw(st.integers(2, 4))
    tensors, ops, known = [Tensor("x", 1)], [], ["x"]

    def op(name, reads, writes, phase):
        tensors.extend(writes)
        ops.append(
            Op(name, tuple(dict.fromkeys(reads)), tuple(t.name for t in writes), float(draw(costs)), 0, phase)
        )

    for k in range(length):
        op(f"f{k}", (known[-1], draw(st.sampled_from(known))), (Tensor(f"a{k}", draw(sizes)),), "forward")
        known.append(f"a{k}")
    gradient, outputs = known[-1], []
    for k in reversed(range(length)):
        writes = [Tensor(f"g{k}", draw(sizes))]
        if draw(st.integers(0, 3)):
            writes.append(Tensor(f"w{k}", draw(st.integers(1, 2))))
            outputs.append(f"w{k}")
        op(f"b{k}", (gradient, known[k + 1], *ops[k].reads), writes, "backward")
        gradient = f"g{k}"
    return TrainingGraph("step", tuple(tensors), ("x",), (gradient, *outputs), tuple(ops))


def no_more_than_the_optimum(graph, budget, chosen, large):
    """Check each search, if tensors above the largest one's bytes divided by ``large`` are tracked; return whether any
    proves the optimum, and more than the ops that must run."""
    best, floor = optimum(graph, budget), precedence(graph).needed
    base = sum(op.cost for k, op in enumerate(graph.ops) if floor >> k & 1) / graph.base_cost - 1
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(tail_search, "LARGE", large)
        found = list(searches(graph, budget, chosen))
        assert not any(search.proves(best + 1e-9, ENOUGH)[0] for search in found)
        assert all(highest_proven(search, base, Effort(5)) <= best + 1e-9 for search in found)
        return best > base and any(search.proves(best - 1e-9, ENOUGH)[0] for search in found)


@LAWS
@given(graphs(), st.integers(0, 6), st.integers(0, 2**30), st.sampled_from([1, 2, 8]), st.booleans())
def test_no_more_is_proven_than_the_optimum(graph, slack, chosen, large, once):
    if once:
        names = (op.name for k, op in enumerate(graph.ops) if chosen >> k & 2)
        graph = replace(graph, never_rerun=tuple(names))
    if graph.base_cost:
        no_more_than_the_optimum(graph, least_peak(graph) + slack, chosen, large)


@LAWS
@given(training_steps(), st.integers(0, 3), st.sampled_from([2, 4, 8]))
def test_no_more_is_proven_of_training_steps_with_small_outputs(graph, slack, large):
    no_more_than_the_optimum(graph, least_peak(graph) + slack, 2**30 - 1, large)


def test_the_optimum_of_a_chain_is_proven_where_one_cut_proves_less():
    graph = chain(6)
    budget = least_peak(graph)
    search = BoundSearch(graph, budget)
    priced = search.price(6)
    assert priced < optimum(graph, budget) - 0.1
    search.search_back(6, Effort(moves=10**6))
    assert optimum(graph, budget) - tail_search.STEP < search.best.overhead <= optimum(graph, budget)


def test_a_search_that_may_look_at_too_few_branches_proves_nothing():
    graph = chain(6)
    (search, *_) = searches(graph, least_peak(graph), 2**12 - 2**6)
    assert search.proves(0.45, ENOUGH)[0]
    assert search.proves(0.45, 5) == (False, 5)


def test_a_run_that_makes_a_small_output_and_a_tracked_tensor_counts_once():
    sizes = {"x": 1, "g": 9, "w": 1, "s": 2, "o": 2}
    ops = (
        Op("b", ("x",), ("g", "w"), 3.0),
        Op("c", ("g",), ("s",), 1.0),
        Op("h", ("s",), ("o",), 1.0, 20),  # neither g nor w fits beside it
    )
    graph = TrainingGraph("once", tuple(Tensor(t, b) for t, b in sizes.items()), ("x",), ("g", "w", "o"), ops)
    search = TailSearch(graph, precedence(graph), (1, 2), 1, 25)
    assert optimum(graph, 25) == pytest.approx(0.6)
    assert search.small == ["w"]
    assert search.proves(0.6 - 1e-9, ENOUGH)[0]
    assert not search.proves(0.6 + 1e-9, ENOUGH)[0]


def test_bounds_of_runs_before_a_cut_count_as_branches_while_they_are_new():
    graph = chain(6)
    (search, *_) = searches(graph, least_peak(graph), 2**12 - 2**6)
    with mock.patch.object(tail_search, "NEAR", 1.0):  # then each state has such a bound
        assert search.proves(0.45, tail_search.FLOW) == (False, tail_search.FLOW)
        first, again = search.proves(0.45, ENOUGH), search.proves(0.45, ENOUGH)
    assert first[0]
    assert again[0]
    assert again[1] < tail_search.FLOW < first[1]


def test_the_search_ends_if_it_does_not_prove_its_first_step():
    graph = chain(6)
    (search, *_) = searches(graph, least_peak(graph), 2**12 - 2**6)
    with mock.patch.object(search, "proves", return_value=(False, 7)) as proves:
        assert highest_proven(search, 0.1, Effort(moves=10**6)) == 0.1
    proves.assert_called_once()
