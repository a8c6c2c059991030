"""The chosen cuts are as good as the best of all cuts."""

from __future__ import annotations

import math
from itertools import combinations, pairwise
from random import Random

import problems
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from test_stage_slices import one_op_a_block, tied

from rematplan.ir import UsageError
from rematplan.pipeline.schedules import schedule_named
from rematplan.planner.pipeline.lean_cuts import lean_cuts
from rematplan.planner.pipeline.stage_chain import StageChain, stage_chain
from rematplan.planner.pipeline.stage_partition import StagePartition, changed, descent, partitions, shifted
from rematplan.planner.pipeline.timeline import Link


def by_hand(chain: StageChain, cuts: tuple[int, ...], time, link: Link) -> tuple[float, float]:
    bounds = (0, *cuts, len(chain))
    stages = [time(i, j, s) for s, (i, j) in enumerate(pairwise(bounds))]
    sizes = [(chain.sends[c], chain.returns[c]) for c in cuts]
    slowest = max([*stages, *(n / link.bandwidth for pair in sizes for n in pair)])
    return slowest, sum(stages) + sum(link.latency + n / link.bandwidth for pair in sizes for n in pair)


@settings(max_examples=80, deadline=None)
@given(st.integers(0, 10**6), st.integers(3, 9), st.integers(1, 4), st.floats(0.1, 5), st.floats(0, 5))
def test_no_cut_beats_those_found(seed: int, layers: int, stages: int, speed: float, latency: float) -> None:
    rng = Random(seed)
    graph = problems.random_training(rng, layers)
    chain = stage_chain(graph, one_op_a_block(graph))
    link = Link(latency, 1024 * speed)
    bad = {(rng.randrange(len(chain)), rng.randrange(stages)) for _ in range(2)}

    def time(i: int, j: int, s: int) -> float:
        own = chain.forward[j] - chain.forward[i] + chain.backward[j] - chain.backward[i]
        return math.inf if (i, s) in bad else own * (1 + s / 10)

    found = partitions(chain, stages, time, link)
    every = [by_hand(chain, cuts, time, link) for cuts in combinations(range(1, len(chain)), stages - 1)]
    every = [pair for pair in every if pair[0] < math.inf]
    assert bool(found) == bool(every)
    for one in found:
        assert by_hand(chain, one.cuts, time, link) == pytest.approx((one.slowest, one.through))
    for slowest, through in every:
        assert any(p.slowest <= slowest + 1e-6 and p.through <= through + 1e-6 for p in found)


def test_a_heavy_head_gets_a_stage_with_fewer_layers() -> None:
    tape = problems.Tape("head")
    y = tape.x
    for _ in range(6):
        y = tape.conv(y, 4096)
    chain = stage_chain(graph := tape.finish(tape.conv(y, 3 * 4096)), one_op_a_block(graph))

    def time(i: int, j: int, _s: int) -> float:
        return chain.forward[j] - chain.forward[i] + chain.backward[j] - chain.backward[i]

    best = partitions(chain, 4, time)[0]
    assert best.cuts == (2, 4, 6)  # the head and the loss alone
    assert best.slowest == pytest.approx(time(6, len(chain), 0))


def test_slow_links_move_cuts_to_where_little_crosses() -> None:
    graph = problems.unet(levels=2)
    chain = stage_chain(graph, one_op_a_block(graph))

    def time(i: int, j: int, _s: int) -> float:
        return chain.forward[j] - chain.forward[i] + chain.backward[j] - chain.backward[i]

    fast, slow = partitions(chain, 2, time), partitions(chain, 2, time, Link(0, 1e-3))
    assert chain.sends[slow[0].cuts[0]] == min(chain.sends[1:-1]) < chain.sends[fast[0].cuts[0]]


def test_too_many_stages_and_tied_weights_are_refused() -> None:
    graph = problems.chain(3)
    chain = stage_chain(graph, one_op_a_block(graph))
    with pytest.raises(UsageError, match=r"chain cannot be divided into 5 stages, only into 4$"):
        partitions(chain, 5, lambda i, j, s: 1.0)
    chain = stage_chain(tied(), one_op_a_block(tied()), {"dw": "w", "dv": "v"})
    with pytest.raises(
        UsageError, match=r"tied cannot be .* 3 stages, only into 2: stages cannot share w, which"
    ):
        partitions(chain, 3, lambda i, j, s: 1.0)
    assert partitions(chain, 2, lambda i, j, s: 1.0) == [StagePartition((3,), 1.0, 2.0)]


def test_shifted_cuts_stay_apart() -> None:
    graph = problems.chain(4)
    chain = stage_chain(graph, one_op_a_block(graph))
    assert shifted(chain, (1, 2)) == [(1, 3)]
    assert shifted(chain, (2,)) == [(1,), (3,)]


def test_changed_cuts_move_one_anywhere_or_two_by_one_place() -> None:
    graph = problems.chain(6)
    chain = stage_chain(graph, one_op_a_block(graph))
    assert len(chain) == 7
    assert set(changed(chain, (2,))) == {(1,), (3,), (4,), (5,), (6,)}
    assert set(changed(chain, (2, 4))) == {
        *((1, 4), (3, 4), (2, 3), (2, 5), (2, 6)),
        *((1, 3), (1, 5), (3, 5)),
    }
    assert changed(chain, ()) == []


def test_a_descent_ends_where_no_changed_cuts_cost_less_or_after_enough_calls() -> None:
    graph = problems.chain(8)
    chain = stage_chain(graph, one_op_a_block(graph))

    def cost(cuts: tuple[int, ...]) -> float:
        """The way to (3, 6); moving only one cut by one place costs more."""
        return abs(cuts[0] - 3) + abs(cuts[1] - 6) + 3 * abs(cuts[1] - cuts[0] - 3)

    assert cost((1, 4)) < min(map(cost, shifted(chain, (1, 4))))
    assert descent(chain, (1, 4), cost, 1000) == (3, 6)
    assert descent(chain, (1, 4), cost, len(shifted(chain, (1, 4)))) == (1, 4)
    assert descent(chain, (1, 4), cost, 0) == (1, 4)


def test_a_descent_tries_no_more_cuts_than_it_may() -> None:
    graph, tried = problems.chain(8), set[tuple[int, ...]]()
    chain = stage_chain(graph, one_op_a_block(graph))

    def cost(cuts: tuple[int, ...]) -> float:
        tried.add(cuts)
        return -sum(cuts)

    assert sum(descent(chain, (1, 4), cost, 20)) > 5
    assert len(tried) <= 21


@pytest.mark.parametrize("changes", [0, 1, 3])
def test_lean_cuts_are_searched_for_with_no_more_changes_than_allowed(changes: int) -> None:
    graph, tried = problems.chain(8), list[tuple[int, ...]]()
    chain = stage_chain(graph, one_op_a_block(graph))

    def peaks(cuts: tuple[int, ...]) -> list[int]:
        tried.append(cuts)
        return [100 - cuts[0], 0, 0]

    schedule = schedule_named("1f1b", 3, 6)
    cuts = lean_cuts(chain, schedule, lambda start, end, _: float(end - start), peaks, changes)
    assert len(tried) == (changes + 1 if changes else 0)
    assert not changes or cuts == max(tried)
