"""The bytes that a rank holds during each action equal an independent count."""

import re
from dataclasses import fields, replace

import pytest
from hypothesis import given
from hypothesis import strategies as st
from replay import replayed

from rematplan.ir import ProblemError
from rematplan.planner.pipeline.actions import Action, StagePlan, schedule_of_rows
from rematplan.planner.pipeline.rank_memory import in_flight, rank_bytes, rank_peak

BYTES = st.integers(0, 99)


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
        actions.append(Action(left[key].pop(0), *key))  # type: ignore[arg-type]
        if not left[key]:
            del left[key]
    names = [f.name for f in fields(StagePlan) if f.type in ("int", "int | None") and f.name != "stage"]
    plans = {s: StagePlan(s, **{name: draw(BYTES) for name in names}) for s in range(stages)}
    return tuple(actions), plans


@given(ranks())
def test_the_bytes_of_each_action_are_those_of_an_independent_account(
    rank: tuple[tuple[Action, ...], dict[int, StagePlan]],
) -> None:
    actions, plans = rank
    assert list(rank_bytes(actions, plans.values())) == replayed(actions, plans)
    assert rank_peak(actions, plans.values()) == max(replayed(actions, plans))


def test_one_forward_one_backward_holds_all_but_one_of_the_micro_batches_in_flight() -> None:
    """states + (k − 1)·K + the larger transient."""
    rows = [[("F", 0, 0), ("F", 0, 1), ("B", 0, 0), ("F", 0, 2), ("B", 0, 1), ("B", 0, 2)]]
    schedule = schedule_of_rows("two in flight", 1, 3, rows)
    plan = StagePlan(0, kept_bytes=10, transient_forward=17, transient_backward=19, states=100)
    assert in_flight(schedule.actions[0]) == {0: 2}
    assert rank_peak(schedule.actions[0], [plan]) == 100 + 10 + 19
    late = replace(plan, gradients=7, first_backward=25)
    assert rank_peak(schedule.actions[0], [late]) == 100 + 7 + 10 + 19


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
