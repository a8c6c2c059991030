"""A pipeline file whose actions are not those that PyTorch runs is refused, for each schedule."""

from dataclasses import replace

import pytest

from rematplan.ir import ProblemError
from rematplan.pipeline.schedules import SCHEDULES, require_torch_actions, schedule_named


@pytest.mark.parametrize("name", [name for name in SCHEDULES if name != "dataflow"])
def test_another_order_of_two_actions_is_refused(name: str) -> None:
    schedule = schedule_named(name, 2, 4)
    require_torch_actions(schedule)
    first, row = schedule.actions
    at = next(k for k in range(len(row) - 1) if row[k].microbatch != row[k + 1].microbatch)
    swapped = (*row[:at], row[at + 1], row[at], *row[at + 2 :])
    with pytest.raises(
        ProblemError, match=f"'{name}', rank 1: action {at} is {row[at + 1]}, but PyTorch runs"
    ):
        require_torch_actions(replace(schedule, actions=(first, swapped)))
