"""Stages of a training step, with the messages of their neighbours, together compute what the step computes."""

from __future__ import annotations

from dataclasses import replace
from itertools import pairwise
from random import Random

import problems
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from rematplan.ir import Op, ProblemError, Tensor, TrainingGraph, UsageError
from rematplan.ir.recoverable import recoveries
from rematplan.planner.arrays.indexed import indexed
from rematplan.planner.pipeline.stage_chain import StageChain, blocks_at, stage_chain
from rematplan.planner.pipeline.stage_plan import StagePlan
from rematplan.planner.pipeline.stage_problem import StageProblem
from rematplan.planner.pipeline.stage_slices import BOUNDARY, WEIGHTS, StageSlice, stage_problem
from rematplan.planner.strategies.store_all import no_recompute


def one_op_a_block(graph: TrainingGraph) -> list[tuple[int, ...]]:
    return [(o,) for o, forward in enumerate(indexed(graph).forward) if forward]


def slices(chain: StageChain, cuts: list[int]) -> list[StageSlice]:
    bounds = [0, *cuts, len(chain)]
    return [StageSlice(chain, low, high) for low, high in pairwise(bounds)]


def problems_of(pieces: list[StageSlice], split: bool) -> list[StageProblem]:
    return [stage_problem(p, StagePlan(i), split=split) for i, p in enumerate(pieces)]


def run_in_parts(
    graph: TrainingGraph, pieces: list[StageSlice], stages: list[StageProblem], split: bool
) -> None:
    """Run forwards, backwards and weight parts, each with nothing but what its stage holds and is sent."""
    names = indexed(graph).tensors
    own = [{t for t in s.graph.inputs if t in graph.inputs} for s in stages]

    def run(stage: int, ops: tuple[Op, ...]) -> None:
        for op in ops:
            assert own[stage].issuperset(op.reads), (stage, op.name, set(op.reads) - own[stage])
            own[stage].update(op.writes)

    def part(stage: StageProblem, number: int) -> tuple[Op, ...]:
        at = [i for i, op in enumerate(stage.graph.ops) if op.name in (BOUNDARY, WEIGHTS)]
        bounds = [0, *at, len(stage.graph.ops)]
        return stage.graph.ops[bounds[number] : bounds[number + 1]]

    for s, stage in enumerate(stages):
        if s:
            sent = {names[t] for t in pieces[s].received}
            assert sent == {names[t] for t in pieces[s - 1].sent} <= own[s - 1]
            own[s] |= sent
        run(s, part(stage, 0))
    for s in reversed(range(len(stages))):
        if s + 1 < len(stages):
            sent = {names[t] for t in pieces[s].answered}
            assert sent == {names[t] for t in pieces[s + 1].returned} <= own[s + 1]
            own[s] |= sent
        run(s, part(stages[s], 1))
    for s, stage in enumerate(stages) if split else ():
        run(s, part(stage, 2))
    made = [t for s in stages for t in s.graph.outputs if t in graph.outputs]
    made += [t for s in stages for t in s.gradients.values()]
    assert set(made) >= set(graph.outputs)


@settings(max_examples=60, deadline=None)
@given(st.integers(0, 10**6), st.integers(2, 12), st.booleans(), st.data())
def test_stages_do_together_what_the_step_does(
    seed: int, layers: int, split: bool, data: st.DataObject
) -> None:
    graph = problems.random_training(Random(seed), layers)
    chain = stage_chain(graph, one_op_a_block(graph))
    cuts = sorted(data.draw(st.sets(st.integers(1, len(chain) - 1), max_size=3)))
    pieces = slices(chain, cuts)
    stages = problems_of(pieces, split)
    run_in_parts(graph, pieces, stages, split)
    for stage in stages:  # else a search leaves the boundary out
        needed = {*stage.graph.outputs, *(t for op in stage.graph.ops for t in op.reads)}
        assert {BOUNDARY, *([WEIGHTS] if split else [])} <= needed
    ours = [op.name for s in stages for op in s.graph.ops if op.name in graph.op]
    assert sorted(ours) == sorted(op.name for op in graph.ops)
    for stage, piece in zip(stages, pieces, strict=True):
        figures = stage.measured(no_recompute(stage.graph))
        assert figures.times.forward == pytest.approx(chain.forward[piece.end] - chain.forward[piece.start])
        assert figures.times.backward + figures.times.weight == pytest.approx(
            chain.backward[piece.end] - chain.backward[piece.start]
        )
        assert figures.times.extra == pytest.approx(0)


def test_skips_of_a_unet_pass_through_every_stage_between() -> None:
    graph = problems.unet(levels=2)
    chain = stage_chain(graph, one_op_a_block(graph))
    n = len(chain)
    pieces = slices(chain, [n // 4, n // 2, 3 * n // 4])
    skips = [t for t in pieces[1].received if t in pieces[1].sent and t in pieces[2].sent]
    assert skips, "the first skip is made in the first stage and read in the last"
    for piece, stage in zip(pieces[1:3], problems_of(pieces[1:3], False), strict=True):
        names = {indexed(graph).tensors[t] for t in skips}
        assert names <= set(stage.graph.inputs)  # torch receives into buffers, one a micro-batch
        assert set(skips) <= set(piece.received) & set(piece.sent)
    gradients = set(pieces[3].returned) & set(pieces[1].returned)
    assert {indexed(graph).bytes[t] for t in gradients} == {indexed(graph).bytes[t] for t in skips}


Row = tuple[str, tuple[str, ...], tuple[str, ...]]


def step_of(
    name: str, forward: list[Row], backward: list[Row], inputs: tuple[str, ...], outputs: tuple[str, ...]
) -> TrainingGraph:
    """A step of ops (name, reads, writes) that cost 1 and write 8 bytes a tensor."""
    ops = tuple(
        Op(n, r, w, 1.0, 0, phase)
        for phase, rows in (("forward", forward), ("backward", backward))
        for n, r, w in rows
    )
    names = dict.fromkeys(t for op in ops for t in (*op.reads, *op.writes))
    return TrainingGraph(name, tuple(Tensor(t, 8) for t in names), inputs, outputs, ops)


def tied() -> TrainingGraph:
    """An embedding whose weight is the head's, too, with a layer between."""
    forward: list[Row] = [
        ("e", ("x", "w"), ("a",)),
        ("h", ("a", "v"), ("b",)),
        ("o", ("b", "w"), ("c",)),
        ("l", ("c",), ("loss",)),
    ]
    backward: list[Row] = [
        ("dl", ("c",), ("dc",)),
        ("do", ("dc", "b", "w"), ("db", "dw2")),
        ("dh", ("db", "a", "v"), ("da", "dv")),
        ("de", ("da", "x", "dw2"), ("dw",)),
    ]
    return step_of("tied", forward, backward, ("x", "w", "v"), ("loss", "dw", "dv"))


def read_late(read: str) -> StageChain:
    """Three layers, of which the backward of the last one reads ``read``, too: the value s that the first layer makes,
    or the first layer's weight u. No other forward op reads either."""
    forward: list[Row] = [
        ("f", ("x", "u"), ("a", "s")),
        ("g", ("a", "v"), ("b",)),
        ("h", ("b", "w"), ("c", "t")),
    ]
    backward: list[Row] = [
        ("dh", ("t", read, "w"), ("db", "dw")),
        ("dg", ("db", "a", "v"), ("da", "dv")),
        ("df", ("da", "x"), ("du",)),
    ]
    graph = step_of("late", forward, backward, ("x", "u", "v", "w"), ("c", "s", "du", "dv", "dw"))
    return stage_chain(graph, one_op_a_block(graph), {"du": "u", "dv": "v", "dw": "w"})


@pytest.mark.parametrize("split", [False, True])
def test_a_value_that_only_the_backward_of_a_later_stage_reads_is_sent_to_it(split: bool) -> None:
    chain = read_late("s")
    names = indexed(chain.graph).tensors
    assert dict(zip((op.name for op in chain.graph.ops), chain.block, strict=True))["dh"] == 2
    chain.check_cuts([1, 2])
    pieces = slices(chain, [1, 2])
    assert [{names[t] for t in piece.received} for piece in pieces] == [set(), {"a", "s"}, {"b", "s"}]
    run_in_parts(chain.graph, pieces, problems_of(pieces, split), split)


def test_a_weight_that_only_the_backward_of_a_later_stage_reads_is_refused_by_name() -> None:
    """The later stage would compute with a copy that its owner's update does not reach."""
    chain = read_late("u")
    assert chain.allowed() == ()
    for cuts in ([1], [2], [1, 2]):
        with pytest.raises(UsageError, match="late: u is read by several stages"):
            chain.check_cuts(cuts)


def test_tied_weights_are_refused_by_name() -> None:
    graph = tied()
    chain = stage_chain(graph, one_op_a_block(graph), {"dw": "w", "dv": "v"})
    assert chain.allowed() == (3,)  # before the loss
    chain.check_cuts([3])
    with pytest.raises(
        UsageError, match="tied: w is read by several stages; choose cuts that keep all its readers in one"
    ):
        chain.check_cuts([2])


def test_an_op_that_reads_what_a_stage_returns_runs_before_its_second_boundary() -> None:
    """The stage before takes the returned tensor at the boundary, and the bias gradient is a sum of it."""
    forward: list[Row] = [("f", ("x", "u"), ("a",)), ("g", ("a", "v"), ("b",))]
    backward: list[Row] = [
        ("dg", ("b", "v"), ("da",)),
        ("gw", ("da", "a"), ("dv",)),
        ("df", ("da", "x"), ("du",)),
    ]
    graph = step_of("reading", forward, backward, ("x", "u", "v"), ("b", "du", "dv"))
    chain = stage_chain(graph, one_op_a_block(graph), {"du": "u", "dv": "v"})
    first, last = (problem.graph for problem in problems_of(slices(chain, [1]), split=True))
    assert last.ordered == ("gw", WEIGHTS)
    assert first.ordered == ()  # it returns nothing


def test_only_a_stage_that_recovers_its_input_inverts_to_it() -> None:
    """Other stages receive the input into a buffer of torch, which stays."""
    chain = read_late("s")
    back = Op("a from b", ("b", "v"), ("a",), 1.0)
    chain = replace(chain, graph=replace(chain.graph, inverses=(back,)))
    second = StageSlice(chain, 1, 2)
    ordinary, recovering = (stage_problem(second, StagePlan(1), recovers=r) for r in (False, True))
    assert ordinary.graph.inverses == ()
    assert recoveries(ordinary.graph) == {}
    assert back in recovering.graph.inverses


def test_a_bias_gradient_is_made_where_its_bias_is() -> None:
    forward: list[Row] = [("f", ("x", "w", "b"), ("y",)), ("g", ("y", "v"), ("z",)), ("l", ("z",), ("loss",))]
    backward: list[Row] = [
        ("dl", ("z",), ("dz",)),
        ("dg", ("dz", "y", "v"), ("dy", "dv")),
        ("sum", ("dy",), ("db",)),
        ("df", ("dy", "x"), ("dw",)),
    ]
    graph = step_of("bias", forward, backward, ("x", "w", "b", "v"), ("loss", "dv", "db", "dw"))
    chain = stage_chain(graph, one_op_a_block(graph), {"dv": "v", "db": "b", "dw": "w"})
    assert dict(zip((op.name for op in graph.ops), chain.block, strict=True))["sum"] == 0
    first, second = problems_of(slices(chain, [1]), False)
    assert first.gradients == {"(db added)": "db", "(dw added)": "dw"}
    assert second.gradients == {"(dv added)": "dv"}
    assert first.states == ("x", "w", "b")


def test_a_stage_without_backward_has_one_plan() -> None:
    """It runs as it is, so no search may order its ops anew or run them again."""
    sizes = {"x": 8, "a": 8, "b": 8, "c": 8, "w": 4, "y": 1, "dw": 4}
    ops = (
        Op("f", ("x",), ("a",), 1.0, 0, "forward"),
        Op("g", ("a",), ("b",), 1.0, 0, "forward"),
        Op("h", ("a", "b"), ("c",), 1.0, 0, "forward"),
        Op("loss", ("c", "w"), ("y",), 1.0, 0, "forward"),
        Op("back", ("c", "w"), ("dw",), 1.0, 0, "backward"),
    )
    graph = TrainingGraph("g", tuple(Tensor(*one) for one in sizes.items()), ("x", "w"), ("y", "dw"), ops)
    chain = stage_chain(graph, [(0, 1, 2), (3,)], {"dw": "w"})
    first = problems_of(slices(chain, [1]), False)[0].graph
    assert first.ordered == ("f", "g", "h")
    assert set(first.never_rerun) == {"f", "g", "h", BOUNDARY}


def test_an_op_that_adds_to_a_gradient_runs_only_once() -> None:
    """Each further run would add the gradient once more."""
    sizes = {"x": 8, "w": 4, "a": 8, "y": 1, "da": 8, "dx": 8, "dw": 4}
    ops = (
        Op("f", ("x", "w"), ("a",), 1.0, 0, "forward"),
        Op("loss", ("a",), ("y",), 1.0, 0, "forward"),
        Op("back loss", ("a",), ("da",), 1.0, 0, "backward"),
        Op("back f", ("da", "x", "w"), ("dx", "dw"), 1.0, 0, "backward"),
    )
    graph = TrainingGraph("g", tuple(Tensor(*one) for one in sizes.items()), ("x", "w"), ("y", "dw"), ops)
    (whole,) = problems_of(slices(stage_chain(graph, [(0, 1)], {"dw": "w"}), []), False)
    assert whole.gradients == {"(dw added)": "dw"}
    assert "back f" in whole.graph.never_rerun


def test_blocks_begin_at_forward_ops() -> None:
    graph = problems.chain(5)
    assert blocks_at(graph, [2, 4]) == ((0, 1), (2, 3), (4, 5))


def test_a_problem_without_backward_and_blocks_out_of_order_are_refused() -> None:
    graph = problems.chain(2)
    with pytest.raises(UsageError, match=r"conv_2 reads a result of conv_1, which is in a later stage"):
        stage_chain(graph, [(1,), (0,), (2,)])
    forward = TrainingGraph(
        "f", graph.tensors[:3], (graph.tensors[0].name, graph.tensors[1].name), (), graph.ops[:1]
    )
    with pytest.raises(ProblemError, match="f: a pipeline needs a forward and a backward"):
        stage_chain(forward, 2)
