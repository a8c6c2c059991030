"""Lower bounds never exceed the optimum that an exhaustive search over all schedules finds."""

from __future__ import annotations

import math
import random
import time
from contextlib import nullcontext
from types import SimpleNamespace
from unittest.mock import patch

import pytest
from brute_force import cheapest
from hypothesis import given, settings
from hypothesis import strategies as st

from rematplan.ir import Op, Tensor, TrainingGraph
from rematplan.planner.arrays.precedence import precedence
from rematplan.planner.auto.auto_strategy import Auto
from rematplan.planner.bounds import bound_search as bounds
from rematplan.planner.bounds.bound_search import BoundSearch
from rematplan.planner.bounds.cut_bounds import Bound, min_peak_bound
from rematplan.planner.bounds.cut_growth import SIBLINGS, Growth
from rematplan.planner.bounds.cut_places import cut_candidates, heaviest_chain, in_line, prominence
from rematplan.planner.bounds.max_flow import CutNetwork
from rematplan.planner.bounds.multi_cut_program import COST_UNIT, CutProgram
from rematplan.planner.core.effort import Effort
from rematplan.planner.ilp.solver import Solver
from rematplan.planner.strategies.anneal import Anneal
from rematplan.planner.strategies.store_all import no_recompute

LAWS = settings(derandomize=True, deadline=None, max_examples=60)
SOLVER = Solver()


def lower_bound(graph: TrainingGraph, budget: int, seconds: float) -> Bound:
    """As the planner's, in one solver's process for all: to begin one takes longer than to solve most of these."""
    with patch.object(bounds, "Solver", lambda: nullcontext(SOLVER)):
        return BoundSearch(graph, budget).run(Effort(seconds))


@st.composite
def graphs(draw, most=7, inverses=False):
    """Small problems: several writes an op, workspaces, free sizes and costs, any outputs."""
    tensors, ops, known = [Tensor("x", draw(st.integers(0, 3)))], [], ["x"]
    for i in range(draw(st.integers(1, most))):
        reads = tuple(draw(st.lists(st.sampled_from(known), max_size=3, unique=True)))
        writes = tuple(f"t{i}{k}" for k in range(draw(st.sampled_from([1, 1, 1, 2]))))
        tensors += [Tensor(t, draw(st.integers(0, 6))) for t in writes]
        ops.append(
            Op(f"o{i}", reads, writes, float(draw(st.integers(0, 5))), draw(st.sampled_from([0, 0, 2])))
        )
        known += writes
    outputs = tuple(draw(st.lists(st.sampled_from(known), min_size=1, max_size=3, unique=True)))
    extra = ()
    if inverses and len(known) > 2:
        back, source = draw(st.sampled_from(known[1:])), draw(st.sampled_from(known))
        if back != source:
            extra = (Op("inverse", (source,), (back,), 1.0),)
    return TrainingGraph("drawn", tuple(tensors), ("x",), outputs, tuple(ops), extra)


def optimum(graph, budget):
    """Least overhead of any schedule within the budget; inf if none."""
    cost = cheapest(graph, budget)
    return cost / graph.base_cost - 1 if graph.base_cost else cost  # which is 0 or infinite


def least_peak(graph):
    """The smallest budget that some schedule fits."""
    low, high = 0, graph.input_bytes + sum(t.bytes for t in graph.tensors) + 2
    while low < high:
        middle = (low + high) // 2
        low, high = (low, middle) if optimum(graph, middle) < math.inf else (middle + 1, high)
    return low


@LAWS
@given(graphs(), st.integers(0, 6))
def test_the_bound_is_at_most_the_optimum(graph, slack):
    budget = least_peak(graph) + slack
    assert lower_bound(graph, budget, 5).overhead <= optimum(graph, budget) + 1e-12


@LAWS
@given(graphs(), st.integers(0, 6))
def test_priced_cuts_are_at_most_the_optimum_and_the_one_cut_relaxation(graph, slack):
    budget = least_peak(graph) + slack
    best, order = optimum(graph, budget), precedence(graph)
    for cut in range(len(graph.ops)):
        if order.needed >> cut & 1 and graph.base_cost:
            priced = CutNetwork(graph, order, cut).overhead(budget)
            assert priced <= best + 1e-9
            assert priced <= one_cut(graph, order, cut, budget) + 1e-6


def one_cut(graph, order, cut, budget):
    """Overhead of the one-cut program's linear relaxation, solved by HiGHS."""
    program = CutProgram(graph, order, (cut,), budget, 0)
    if program.rows.impossible:
        return math.inf
    answer = SOLVER.solve(program.rows, Effort(10), integer=False, gap=0.0)
    return (answer.dual + program.rows.constant) * COST_UNIT - 1


@LAWS
@given(graphs(inverses=True), st.integers(0, 4), st.integers(0, 2**30))
def test_programs_of_any_cuts_are_at_most_the_optimum(graph, slack, chosen):
    budget, order = least_peak(graph) + slack, precedence(graph)
    cuts = []
    for op in range(len(graph.ops)):  # any chain of needed ops, each of which must precede the next
        follows = not cuts or order.before[op] >> cuts[-1] & 1
        if order.needed >> op & 1 and follows and chosen >> op & 1:
            cuts.append(op)
    if cuts and graph.base_cost:
        search = BoundSearch(graph, budget)
        search._solver = SOLVER
        for integer in (False, True):
            assert search.solve(cuts, Effort(5), integer=integer)[0] <= optimum(graph, budget) + 1e-9


@LAWS
@given(graphs(inverses=True), st.integers(0, 2**30))
def test_cuts_in_line_with_a_chain_can_be_added_to_it(graph, chosen):
    order = precedence(graph)
    needed = [v for v in range(len(order.before)) if order.needed >> v & 1]
    cuts = []
    while line := [v for v in in_line(order, cuts) if v not in cuts]:
        assert set(line) <= set(needed)
        assert sorted(line) == line
        cuts.append(line[chosen % len(line)])
    for u in cuts:
        assert all(order.before[u] >> v & 1 or order.before[v] >> u & 1 for v in cuts)
    for v in set(needed).difference(cuts):  # none was left out that could have been taken
        assert any(not (order.before[u] >> v & 1 or order.before[v] >> u & 1) for u in cuts)


def branched(trunk, branches):
    """A chain of unit ops that forks into chains of some (length, size), and its gradient."""
    tensors, ops = [Tensor("a0", 1)], []

    def op(name, reads, size):
        tensors.append(Tensor(name, size))
        ops.append(Op(f"make_{name}", tuple(reads), (name,), 1.0))
        return name

    for k in range(trunk):
        op(f"a{k + 1}", [f"a{k}"], 1)
    fork, ends, backs = f"a{trunk}", [], []
    for b, (length, size) in enumerate(branches):
        at = fork
        for k in range(length):
            at = op(f"b{b}{k}", [at], size)
        ends.append(at)
    loss = op("loss", ends, 1)
    for b, (length, size) in enumerate(branches):
        at = loss
        for k in reversed(range(length)):
            at = op(f"e{b}{k}", [at, f"b{b}{k}"], size)
        backs.append(op(f"e{b}", [at, fork], 1))
    at = op("d", backs, 1)
    for k in reversed(range(trunk)):
        at = op(f"d{k}", [at, f"a{k}"], 1)
    return TrainingGraph("branched", tuple(tensors), ("a0",), (at,), tuple(ops))


def test_further_cuts_are_in_branches_outside_of_the_chain():
    for (trunk, branches), budget, least in (  # along the chain alone 0.17, 0.09
        ((5, [(4, 2), (4, 4)]), 16, 0.3),
        ((2, [(1, 5), (1, 1), (4, 1)]), 12, 1 / 3),
    ):
        graph = branched(trunk, branches)
        floor = lower_bound(graph, budget, 5).overhead
        assert floor >= least - 1e-6
        assert floor <= Anneal(moves=100_000).plan(graph, budget).estimate.overhead


def test_a_bound_for_a_larger_budget_does_not_end_the_search():
    graph = branched(8, [(2, 3)] * 3)
    BoundSearch(graph, 13).run(Effort(5))
    assert BoundSearch(graph, 11).run(Effort(5)).overhead == pytest.approx(2 / 3)


def test_cuts_are_placed_where_tensor_sizes_change(problems):
    graph = problems.unet(4)
    chain_ = heaviest_chain(graph, precedence(graph))
    places = cut_candidates(graph, chain_, 24)
    held = dict(chain_)
    assert held[places[0]] == max(held.values())
    assert 2 < len(places) == len(set(places)) <= 24
    assert all(place in held and place >= places[0] for place in places)
    assert cut_candidates(graph, [], 24) == []


@LAWS
@given(st.lists(st.integers(0, 8), min_size=1, max_size=12))
def test_prominence_is_the_height_above_the_highest_saddle(heights):
    def over(k, towards):
        """The lowest height on the way to the nearest higher entry, 0 if there is none."""
        low = heights[k]
        for j in towards:
            if (heights[j], -j) > (heights[k], -k):
                return low
            low = min(low, heights[j])
        return 0

    n = len(heights)
    expected = [
        h - max(over(k, range(k - 1, -1, -1)), over(k, range(k + 1, n))) for k, h in enumerate(heights)
    ]
    assert prominence(heights, [0] * n) == expected


def test_a_bound_for_a_budget_holds_for_smaller_budgets():
    graph = chain(8)
    budget = least_peak(graph) + 2
    proven = lower_bound(graph, budget, 5)
    assert BoundSearch(graph, budget - 1).best.overhead >= proven.overhead > 0


def test_a_stopped_search_ends(problems):
    graph = problems.residual((2, 2, 2))
    search = BoundSearch(graph, int(0.6 * sum(t.bytes for t in graph.tensors)))
    search.stop()
    began = time.process_time()
    search.run(Effort(60))
    assert time.process_time() - began < 5


def test_an_extended_search_uses_the_added_time(problems):
    graph, again = problems.unet(3), problems.unet(3)
    budget = no_recompute(graph).estimate.peak // 2
    search, effort = BoundSearch(graph, budget), Effort(0.05)

    def extended(_floor):
        effort.extend(30.0)
        return False

    assert search.run(effort, extended) == bounds.lower_bound(again, budget, 30.0)


def test_the_set_of_cuts_can_start_at_the_loss_and_in_either_branch(problems):
    graph = problems.towers(20, 5)
    search = BoundSearch(graph, no_recompute(graph).estimate.peak // 2)
    along = {op for op, _ in search.chain}
    assert [graph.ops[op].name for op in search.waist] == ["cat_36"]
    assert set(search.waist) < set(search.starts)
    assert any(graph.ops[op].phase == "backward" for op in set(search.starts) - along)


def test_two_cuts_can_raise_the_bound_though_neither_does_alone(problems):
    graph = problems.random_training(random.Random(37), 12)
    budget = int(0.7 * no_recompute(graph).estimate.peak)
    order = precedence(graph)

    def proven(*cuts):
        rows = CutProgram(graph, order, cuts, budget, 0).rows
        return SOLVER.solve(rows, Effort(20.0), integer=True, gap=0.0).dual + rows.constant

    alone = proven(21, 26)
    assert proven(21, 26, 28) == pytest.approx(alone)
    assert proven(21, 26, 29) == pytest.approx(alone)
    together = COST_UNIT * proven(21, 26, 28, 29) - 1
    assert together > COST_UNIT * alone - 1 + 0.01
    search = BoundSearch(graph, budget)
    Growth(search, Effort(20.0), lambda _: False).grow((21, 26), range(len(graph.ops)))
    assert search.best.overhead >= together - 1e-6


def test_the_first_solved_cut_is_added_after_several_that_did_not_raise_the_bound():
    """Also if the programs of the first of them took too long to solve."""
    solved: list[tuple[int, ...]] = []

    class Stub(Growth):
        def resident(self, cuts, among):
            return dict.fromkeys(set(among) - set(cuts), 1)

        def likely(self, resident, tried, failed):
            return sorted(set(resident) - set(tried))

        def most_lifting(self, cuts, likely):
            return likely[0]

        def solve(self, cuts):
            solved.append(cuts)
            return 0.0, len(solved) == 1 or cuts[0] >= SIBLINGS

    best = SimpleNamespace(unreachable=False, overhead=0.0)
    search = SimpleNamespace(chain=(), places=(), stopped=False, best=best)
    added = (SIBLINGS, 99)
    Stub(search, Effort(20.0), lambda _: len(solved) > 9).grow((99,), range(20))
    assert solved[: SIBLINGS + 3] == [(99,), *((op, 99) for op in range(SIBLINGS)), added, added]
    assert set(added) < set(solved[SIBLINGS + 3])


def test_a_priced_cut_is_the_one_cut_relaxation_of_a_chain():
    graph = chain(12)
    order, cut = precedence(graph), 12
    for budget in (6, 8, 10):
        exact = one_cut(graph, order, cut, budget)
        assert exact > 0
        assert CutNetwork(graph, order, cut).overhead(budget) == pytest.approx(exact, abs=1e-6)


@LAWS
@given(graphs(inverses=True), st.integers(0, 4))
def test_bound_is_at_most_the_optimum_with_inverses(graph, slack):
    budget = least_peak(graph) + slack
    assert lower_bound(graph, budget, 5).overhead <= optimum(graph, budget) + 1e-12


@LAWS
@given(graphs(inverses=True))
def test_the_peak_bound_is_at_most_the_smallest_peak(graph):
    assert min_peak_bound(graph).bytes <= least_peak(graph)


@LAWS
@given(graphs())
def test_unreachable_budgets_have_no_schedule(graph):
    budget = least_peak(graph)
    assert not lower_bound(graph, budget, 5).unreachable
    assert lower_bound(graph, min_peak_bound(graph).bytes - 1, 5).unreachable


def chain(length, backward=True):
    """A forward chain of unit ops and, with ``backward``, its gradient, each step reading the activation too."""
    ops = [Op(f"f{i}", (f"a{i}",), (f"a{i + 1}",), 1.0, 0, "forward") for i in range(length)]
    if backward:
        ops += [
            Op(
                f"b{i}",
                (f"g{i + 1}", f"a{i}") if i < length - 1 else (f"a{length}",),
                (f"g{i}",),
                1.0,
                0,
                "backward",
            )
            for i in reversed(range(length))
        ]
    names = dict.fromkeys(t for o in ops for t in (*o.reads, *o.writes))
    return TrainingGraph("chain", tuple(Tensor(t, 1) for t in names), ("a0",), ("g0",), tuple(ops))


def test_the_bound_counts_recomputation_that_a_chain_cannot_avoid():
    graph = chain(4)
    budget = least_peak(graph)
    bound = lower_bound(graph, budget, 5).overhead
    assert 0 < bound <= optimum(graph, budget)


@pytest.mark.parametrize("length", [2, 3, 4, 5])
def test_the_bound_is_monotone_in_the_budget(length):
    graph = chain(length)
    bounds = [lower_bound(graph, b, 5).overhead for b in range(3, 2 * length + 3)]
    assert bounds == sorted(bounds, reverse=True)


def test_precedence_allows_for_inverses_as_alternatives():
    tensors = tuple(Tensor(t, 1) for t in "xabc")
    ops = (Op("a", ("x",), ("a",), 1.0), Op("b", ("x",), ("b",), 1.0), Op("c", ("a",), ("c",), 1.0))
    plain = TrainingGraph("p", tensors, ("x",), ("c",), ops)
    either = TrainingGraph("p", tensors, ("x",), ("c",), ops, (Op("i", ("b",), ("a",), 1.0),))
    assert precedence(plain).before[2] == 0b101
    assert precedence(either).before[2] == 0b100


def vgg_like(width=4):
    """Convolutions and poolings without more, every layer with a backward op that reads its input and its output."""
    rng, layers, side = random.Random(5), [], 224
    for channels, repeats in ((64, 2), (128, 2), (256, 3), (512, 3), (512, 3)):
        for k in range(repeats + 1):
            side //= 1 + (k == repeats)
            cost = 50 + rng.randrange(60) if k == repeats else 300 + rng.randrange(900)
            layers.append((width * channels * side * side, float(cost)))
    n = len(layers)
    sizes = (
        {"loss": 8}
        | {f"a{i}": s for i, (s, _) in enumerate(layers)}
        | {f"d{i}": s for i, (s, _) in enumerate(layers)}
    )
    forward = [
        Op(f"f{i}", (f"a{i - 1}",) if i else (), (f"a{i}",), c, 0, "forward")
        for i, (_, c) in enumerate(layers)
    ]
    backward = [
        Op(
            f"b{i}",
            (f"d{i + 1}" if i + 1 < n else "loss", f"a{i}", *([f"a{i - 1}"] if i else [])),
            (f"d{i}",),
            2 * c,
            0,
            "backward",
        )
        for i, (_, c) in reversed(list(enumerate(layers)))
    ]
    loss = Op("loss", (f"a{n - 1}",), ("loss",), 500.0, 0, "forward")
    return TrainingGraph(
        "vgg", tuple(Tensor(t, s) for t, s in sizes.items()), (), ("d0",), (*forward, loss, *backward)
    )


def test_the_gap_closes_if_many_ops_hold_equal_bytes():
    base = no_recompute(vgg_like()).estimate.peak
    for share in (0.75, 0.7):
        plan = Auto(moves=300_000, reuse=False).plan(vgg_like(), int(share * base))
        assert plan.status == "optimal"
        assert plan.estimate.overhead > 0.02
