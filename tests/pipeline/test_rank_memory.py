"""The bytes that a rank holds during each action equal an independent count."""

import re
from collections.abc import Iterable
from dataclasses import fields, replace
from itertools import chain

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from replay import replayed

from rematplan.ir import Op, ProblemError, Tensor, TrainingGraph
from rematplan.planner.pipeline.actions import (
    DROPS,
    KEEPS,
    RECEIVES,
    SENDS,
    Action,
    Kind,
    schedule_of_rows,
    stages_that_free_outputs,
)
from rematplan.planner.pipeline.gpipe_and_1f1b import dataflow, gpipe, one_forward_one_backward
from rematplan.planner.pipeline.rank_memory import in_flight, rank_bytes, rank_peak
from rematplan.planner.pipeline.stage_chain import stage_chain
from rematplan.planner.pipeline.stage_plan import (
    HeldBytes,
    MessageBytes,
    StagePlan,
    StandingBytes,
    TransientBytes,
)
from rematplan.planner.pipeline.stage_problem import StageProblem
from rematplan.planner.pipeline.stage_slices import StageSlice, stage_problem
from rematplan.planner.strategies.store_all import no_recompute

BYTES = st.integers(0, 99)
SMALL = HeldBytes(4), TransientBytes(9, 9)


@st.composite
def ranks(draw: st.DrawFn) -> tuple[tuple[Action, ...], dict[int, StagePlan]]:
    """A rank of one or two stages with micro-batches in any order."""
    stages = draw(st.integers(1, 2))
    orders = {
        (s, m): draw(st.sampled_from(["FB", "FIW"]))
        for s in range(stages)
        for m in range(draw(st.integers(1, 4)))
    }
    actions = []
    left = {key: list(order) for key, order in orders.items()}
    while left:
        key = draw(st.sampled_from(sorted(left)))
        actions.append(Action(left[key].pop(0), *key))
        if not left[key]:
            del left[key]
        if kinds := draw(st.lists(st.sampled_from((*RECEIVES, *SENDS, *KEEPS, *DROPS)), max_size=2)):
            entries = ((kind, *draw(st.sampled_from(sorted(orders)))) for kind in kinds)
            actions[-1] = replace(actions[-1], messages=tuple(entries))
            if not left:
                actions[-1] = replace(actions[-1], after=actions[-1].messages)
    parts = [HeldBytes, TransientBytes, MessageBytes, StandingBytes]
    plans = {
        s: StagePlan(s, *(kind(*(draw(BYTES) for _ in fields(kind))) for kind in parts))
        for s in range(stages)
    }
    return tuple(actions), plans


@settings(deadline=None)
@given(ranks())
def test_the_bytes_of_each_action_are_those_of_an_independent_account(
    rank: tuple[tuple[Action, ...], dict[int, StagePlan]],
) -> None:
    actions, plans = rank
    found = replayed(actions, plans)
    assert [*chain.from_iterable(rank_bytes(actions, plans.values()))] == found[1:]
    assert rank_peak(actions, plans.values()) == max(found)


def test_one_forward_one_backward_holds_all_but_one_of_the_micro_batches_in_flight() -> None:
    """states + (k − 1)·K + the larger transient."""
    rows = [[("F", 0, 0), ("F", 0, 1), ("B", 0, 0), ("F", 0, 2), ("B", 0, 1), ("B", 0, 2)]]
    schedule = schedule_of_rows("two in flight", 1, 3, rows)
    plan = StagePlan(0, HeldBytes(10), TransientBytes(17, 19), standing=StandingBytes(100))
    assert in_flight(schedule.actions[0]) == {0: 2}
    assert rank_peak(schedule.actions[0], [plan]) == 100 + 10 + 19
    late = replace(
        plan, held=HeldBytes(10, gradients=7), transients=TransientBytes(17, 19, first_backward=25)
    )
    assert rank_peak(schedule.actions[0], [late]) == 100 + 7 + 10 + 19


def during(actions: Iterable[Action], plans: Iterable[StagePlan]) -> list[int]:
    return [most for _, most in rank_bytes(actions, plans)]


def test_sent_tensors_are_gone_when_the_outputs_are_joined() -> None:
    actions = tuple(Action(kind, 0, m) for m in range(3) for kind in "FB")
    standing = StandingBytes(100, left=10, closing=30)
    plan = StagePlan(0, *SMALL, MessageBytes(sent=5, returned=2), standing)
    assert during(actions, [plan])[-2:] == [100 + 2 * 17 + 9, 100 + 3 * 10 + 30]
    assert during(actions, [replace(plan, standing=replace(standing, closing=0))])[-1] == 100 + 3 * 17


@pytest.mark.parametrize("early", [True, False])
def test_a_sent_message_counts_from_its_action_until_it_is_freed(early: bool) -> None:
    """The second of three stages in 1F1B with three micro-batches: F0 F1 B0 F2 B1 B2."""
    (row,) = one_forward_one_backward(3, 3, early).actions[1:2]
    held, messages = HeldBytes(4, loose=50 * early), MessageBytes(2, 3, sent=100, returned=1000)
    plan = StagePlan(1, held, TransientBytes(60, 9), messages)
    assert list(map(str, row)) == ["1F0", "1F1", "1B0", "1F2", "1B1", "1B2"]
    # F1: the output of F0. F2, B1: the gradient of B0. B2: that of B1. The end: that of B2.
    gradients = [0, 0, 0, 1000, 1000, 1000, 1000]
    # If outputs are kept, that of F0 is freed after B1 (the first after F2), and that of F2 never.
    outputs = [0, 50, 0, 0, 0, 0, 0] if early else [0, 0, 0, 100, 100, 0, 100]
    others = [60, 64, 13, 64, 13, 9, 0]  # the transient, and what is kept for other micro-batches
    wanted = list(map(sum, zip(gradients, outputs, others, strict=True)))
    assert during(row, [plan]) == wanted
    # Before B1, the buffer of its gradient exists already; an output that is freed early still exists.
    before = [most for most, _ in rank_bytes(row, [plan])]
    assert before[4] == 2 * 4 + 1000 + 3 + (50 if early else 100)
    # Before the end, the gradient of B1 is freed.
    assert before[-1] == 2000 + (0 if early else 100)


@pytest.mark.parametrize("early", [True, False])
def test_gpipe_holds_a_received_gradient_until_the_next_one_is_received(early: bool) -> None:
    plan = StagePlan(0, *SMALL, MessageBytes(2, 1000))
    row = gpipe(2, 3, early).actions[0]
    assert [before for before, _ in rank_bytes(row, [plan])][3:] == [12 + 1000, 8 + 2000, 4 + 2000, 1000]
    row = gpipe(3, 3, early).actions[1]
    middle = [before for before, _ in rank_bytes(row, [replace(plan, stage=1)])]
    assert middle[3:] == [12 + 1000, 8 + 2000, 4 + 2000, 0]


def test_a_channel_receives_ahead_as_long_as_messages_are_left() -> None:
    """The buffers for the messages of F1 and B0 exist from the start, those for F2 and B1 from F1 and B0 on."""
    (row,) = dataflow(3, 3, 0.0).actions[1:2]
    assert list(map(str, row)) == ["1F0", "1F1", "1B0", "1F2", "1B1", "1B2"]
    plan = StagePlan(1, messages=MessageBytes(2, 1000, credits=1))
    assert during(row, [plan]) == [1002, 1002, 1002, 1000, 1000, 0, 0]
    assert [before for before, _ in rank_bytes(row, [plan])] == [1002, 1002, 1002, 1002, 1000, 1000, 0]
    assert during(row, [replace(plan, messages=MessageBytes(2, 1000, credits=2))]) == [
        2004,
        2002,
        2002,
        2000,
        1000,
        0,
        0,
    ]


def test_torch_frees_outputs_early_only_where_every_output_is_freed_before_its_backward() -> None:
    assert stages_that_free_outputs(one_forward_one_backward(3, 3, True)) == {0, 1}
    assert stages_that_free_outputs(gpipe(3, 3, True)) == {0, 1}
    for schedule in (one_forward_one_backward(3, 3), gpipe(3, 3)):
        assert not stages_that_free_outputs(schedule)


TWO_STAGES = (Action("F", 0, 0), Action("B", 0, 0), Action("F", 1, 0), Action("B", 1, 0))
"""The actions of a rank with two stages and one micro-batch."""


def test_what_torch_needs_to_divide_gradients_is_counted_once_in_a_rank() -> None:
    plans = [
        StagePlan(s, *SMALL, standing=StandingBytes(100, left=30, closing=20, ending=50)) for s in range(2)
    ]
    assert during(TWO_STAGES, plans)[-1] == 2 * (100 + 30) + 50


def test_what_torch_needs_before_the_first_action_is_counted_once_in_a_rank() -> None:
    plans = [StagePlan(s, *SMALL, standing=StandingBytes(100, 10, opening=50)) for s in range(2)]
    assert rank_peak(TWO_STAGES, plans) == 2 * (100 + 10) + 50
    more = TransientBytes(9, 60)
    assert rank_peak(TWO_STAGES, [replace(p, transients=more) for p in plans]) == 2 * (100 + 10) + 60


def both_gradients() -> StageProblem:
    """A stage with a split backward, in which one op computes the input's gradient (10 bytes) and a gradient ``dw`` of
    1000 bytes, and a later op a gradient ``dv`` of 7 bytes."""
    sizes = {"x": 10, "w": 1000, "v": 7, "a": 10, "y": 10, "loss": 1}
    sizes |= {"dy": 10, "da": 10, "dw": 1000, "dv": 7, "dx": 10, "u": 10}
    graph = TrainingGraph(
        "both",
        tuple(Tensor(name, bytes_) for name, bytes_ in sizes.items()),
        ("x", "w", "v", "u"),
        ("loss", "dw", "dv", "dx"),
        (
            Op("f0", ("x", "u"), ("a",), 1.0, 0, "forward"),
            Op("f1", ("a", "w", "v"), ("y",), 1.0, 0, "forward"),
            Op("f2", ("y",), ("loss",), 1.0, 0, "forward"),
            Op("b2", ("y",), ("dy",), 1.0, 0, "backward"),
            Op("b1", ("dy", "a", "w"), ("da", "dw"), 1.0, 0, "backward"),
            Op("b1_v", ("dy", "a"), ("dv",), 1.0, 0, "backward"),
            Op("b0", ("da", "x"), ("dx",), 1.0, 0, "backward"),
        ),
    )
    chain = stage_chain(graph, [[0], [1, 2]], {"dw": "w", "dv": "v", "dx": "u"})
    return stage_problem(StageSlice(chain, 1, 2), StagePlan(1), split=True)


def test_a_gradient_that_one_op_computes_with_that_of_the_input_stays_from_the_first_i_on() -> None:
    problem = both_gradients()
    assert problem.gradients == {"(dw added)": "dw", "(dv added)": "dv"}
    plan = problem.measured(no_recompute(problem.graph))
    assert (plan.held.gradients, plan.held.early_gradients) == (1007, 1000)
    rows = [[(kind, 1, m) for kind, m in (("F", 0), ("I", 0), ("F", 1), ("I", 1), ("W", 0), ("W", 1))]]
    actions = tuple(Action(*row) for row in rows[0])
    most = dict(
        zip(map(str, actions), during(actions, [replace(plan, standing=StandingBytes())]), strict=False)
    )
    deferred = plan.held.deferred
    assert most["1F1"] == 1000 + deferred + plan.transients.forward
    assert most["1I1"] == 1000 + deferred + plan.transients.backward
    assert most["1W0"] == 1000 + deferred + (plan.transients.first_weight or 0)
    assert most["1W1"] == 1007 + plan.transients.weight
    whole = [Action("F", 1, 0), Action("B", 1, 0)]
    assert during(whole, [replace(plan, standing=StandingBytes())])[-1] == 1007


def test_a_message_that_a_w_reads_counts_once_until_then() -> None:
    """The first stage, on the same rank, holds it until its own backward. Actions of stage 9 need nothing."""
    held = HeldBytes(deferred=7, deferred_input=5)
    plans = [StagePlan(0), StagePlan(1, held, messages=MessageBytes(6))]
    rows: list[tuple[Kind, int, int]] = [
        ("F", 0, 0),
        ("F", 1, 0),
        ("I", 1, 0),
        ("F", 9, 0),
        ("W", 1, 0),
        ("F", 9, 1),
        ("I", 0, 0),
        ("F", 9, 2),
    ]
    actions = tuple(Action(*row) for row in rows)
    most = dict(zip(map(str, actions), during(actions, [*plans, StagePlan(9)]), strict=False))
    assert (most["9F0"], most["9F1"], most["9F2"]) == (7 + 1, 6, 0)


def own_outputs() -> StageProblem:
    """A stage that computes no input gradient. Its output, of 10 bytes, is what its first op for a weight's gradient
    reads; the second one reads 3 bytes and writes 40."""
    sizes = {"w": 40, "v": 3, "a": 3, "y": 10, "dy": 10, "dv": 3, "dw": 40, "loss": 0, "weights": 0}
    return StageProblem(
        TrainingGraph(
            "own outputs",
            tuple(Tensor(name, bytes_) for name, bytes_ in sizes.items()),
            ("w", "v", "dy"),
            ("dv", "dw"),
            (
                Op("f0", ("w",), ("a",), 1.0, 0, "forward"),
                Op("f1", ("a", "v"), ("y",), 1.0, 0, "forward"),
                Op("loss", ("y",), ("loss",), 0.0, 0, "backward"),
                Op("weights", ("y", "loss"), ("weights",), 0.0, 0, "backward"),
                Op("b1", ("y", "dy", "weights"), ("dv",), 1.0, 0, "backward"),
                Op("b0", ("a", "dy", "weights"), ("dw",), 1.0, 0, "backward"),
            ),
            never_rerun=("f1", "loss", "weights"),
        ),
        "loss",
        weights="weights",
    )


def test_torch_holds_the_outputs_until_a_whole_backward_ends() -> None:
    """Even if the ops for the gradients of weights free them earlier, as they do in a W of its own."""
    problem = own_outputs()
    plan = problem.measured(no_recompute(problem.graph))
    assert (plan.transients.weight, plan.transients.whole) == (3 + 3 + 40, 10)
    whole = [Action("F", 0, 0), Action("B", 0, 0)]
    halves = [Action("F", 0, 0), Action("I", 0, 0), Action("W", 0, 0)]
    assert max(during(whole, [plan])) - max(during(halves, [plan])) == 10


def test_outputs_that_the_next_stage_holds_are_counted_in_the_forward_only() -> None:
    problem = own_outputs()
    mine, handed = (p.measured(no_recompute(p.graph)) for p in (problem, replace(problem, handed=("y",))))
    assert handed.held.kept == mine.held.kept - 10
    less, more = handed.transients, mine.transients
    assert less.forward == more.forward
    assert less.backward == more.backward - 10
    assert (less.weight, less.whole) == (more.weight, 0)


@pytest.mark.parametrize(
    ("rows", "message"),
    [
        ([[("F", 0, 0), ("W", 0, 0)]], "does FW for micro-batch 0"),
        ([[("B", 0, 0), ("F", 0, 0)]], "does BF for micro-batch 0"),
        ([[("F", 0, 0), ("B", 0, 0), ("F", 0, 1), ("B", 0, 1)]], "micro-batch 1 is not one of this rank"),
        (
            [[("F", 0, 0), ("B", 0, 0)], [("F", 0, 0), ("B", 0, 0)]],
            "each of its 1 stages must have exactly one rank",
        ),
        ([[("X", 0, 0)]], "unknown kind of action 'X'; known: F, B, I, W"),
    ],
)
def test_a_schedule_in_which_a_micro_batch_gets_lost_is_refused(
    rows: list[list[tuple[str, int, int]]], message: str
) -> None:
    with pytest.raises(ProblemError, match=re.escape(message)):
        schedule_of_rows("odd", 1, 1, rows)
