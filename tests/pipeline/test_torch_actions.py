"""A pipeline file whose actions are not those that PyTorch runs is refused, for each schedule."""

from dataclasses import replace

import pytest

from rematplan.ir import ProblemError
from rematplan.pipeline.schedules import SCHEDULES, as_torch_runs_it, schedule_named
from rematplan.planner.pipeline.actions import schedule_of_rows


@pytest.mark.parametrize("name", [name for name in SCHEDULES if name != "dataflow"])
def test_another_order_of_two_actions_is_refused(name: str) -> None:
    schedule = schedule_named(name, 2, 4)
    bare = [[(a.kind, a.stage, a.microbatch) for a in row] for row in schedule.actions]
    run = as_torch_runs_it(schedule_of_rows(name, schedule.stages, 4, bare))
    assert [a.messages for row in run.actions for a in row] == [
        a.messages for row in schedule.actions for a in row
    ]
    first, row = schedule.actions
    at = next(k for k in range(len(row) - 1) if row[k].microbatch != row[k + 1].microbatch)
    swapped = (*row[:at], row[at + 1], row[at], *row[at + 2 :])
    with pytest.raises(
        ProblemError, match=f"'{name}', rank 1: action {at} is {row[at + 1]}, but PyTorch runs"
    ):
        as_torch_runs_it(replace(schedule, actions=(first, swapped)))
