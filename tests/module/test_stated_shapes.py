"""Laws of the sizes that a user states, and of how many plans and captures many sizes leave."""

import gc
import weakref
from typing import Any, cast

import pytest
import torch
from open_models import WIDTH, Of, mlp, sequence, step_of
from same_bits import equal_after, planned_and_plain
from torch import Tensor, nn
from torch.export import Dim

import rematplan
from rematplan import UsageError
from rematplan.module import shape_options

pytestmark = pytest.mark.usefixtures("same_draws")


def test_sizes_outside_their_range_are_refused_and_the_capture_is_made_before_training() -> None:
    ranges = {"input": {0: Dim("rows", min=1, max=9)}}
    planned, plain = planned_and_plain(mlp(), torch.randn(4, WIDTH), dynamic_shapes=ranges)
    before = rematplan.planning(planned).stats()
    assert (before.captures, before.open_captures) == (1, 1)
    for rows in (9, 2, 5):
        batch = (torch.randn(rows, WIDTH),)
        equal_after(lambda model, batch=batch: step_of(model, batch), planned, plain)
    assert rematplan.planning(planned).stats().captures == 1
    with pytest.raises(UsageError, match="input has size 10 in dimension 0; dynamic_shapes allows 1 to 9"):
        planned(torch.randn(10, WIDTH))


def test_dimensions_may_have_any_size_or_one() -> None:
    for free in (
        {"input": {0: Dim.AUTO}},
        {"input": None},
        ({0: Dim("rows")},),
        {"input": (Dim.DYNAMIC, None)},
    ):
        planned, _ = planned_and_plain(mlp(), torch.randn(4, WIDTH), dynamic_shapes=free)
        planned(torch.randn(6, WIDTH)).sum().backward()
    planned, _ = planned_and_plain(mlp(), torch.randn(4, WIDTH), dynamic_shapes={"input": {0: Dim.STATIC}})
    with pytest.raises(UsageError, match="input has size 6 in dimension 0; dynamic_shapes allows 4 to 4"):
        planned(torch.randn(6, WIDTH))


class Sum(nn.Linear):
    """A layer of two inputs of equal numbers of rows."""

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        return super().forward(x).sum(0) + y.sum(0)


def test_one_dim_in_two_arguments_states_equal_sizes() -> None:
    model, rows = Sum(WIDTH, WIDTH), Dim("rows", min=2, max=9)
    inputs = torch.randn(4, WIDTH), torch.randn(4, WIDTH)
    planned, _ = planned_and_plain(model, *inputs, dynamic_shapes=({0: rows}, {0: rows}))
    planned(torch.randn(6, WIDTH), torch.randn(6, WIDTH)).sum().backward()
    with pytest.raises(UsageError, match="rows is 6 in dimension 0 of x and 5 in dimension 0 of y; "):
        planned(torch.randn(6, WIDTH), torch.randn(5, WIDTH))


ROWS = Dim("rows", min=1, max=9)


@pytest.mark.parametrize(
    ("ranges", "message"),
    [
        ({"other": {0: ROWS}}, "no argument other"),
        ({"input": {2: ROWS}}, "no dimension 2"),
        (({2: ROWS},), "no dimension 2"),
        ({"input": {0: ROWS, 1: ROWS}}, "rows is 4 in dimension 0 of input and 8 in dimension 1 of input; "),
        ({"input": {0: (1, 9)}}, r"dimension 0 of input has \(1, 9\); write"),
        ({"input": {0: Dim.AUTO(min=1, max=9)}}, "dimension 0 of input has .*; write"),
        ({"input": 7}, "input has 7; write"),
        ({"input": {0: 3 * ROWS}}, "has size 4 in dimension 0; dynamic_shapes allows 3 to 27 in steps of 3"),
        ({"input": {0: Dim("rows", min=5, max=9)}}, "has size 4"),
        ({"input": {0: 5}}, "has size 4 in dimension 0; dynamic_shapes allows 5 to 5"),
    ],
)
def test_ranges_that_make_no_sense_are_refused(ranges: Any, message: str) -> None:
    with pytest.raises(UsageError, match=message):
        planned_and_plain(mlp(), torch.randn(4, WIDTH), dynamic_shapes=ranges)


def test_many_lengths_leave_a_bounded_number_of_plans(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(shape_options, "MAX_PLANS", 5)
    options = {"strategy": "store_all", "budget": "1GiB", "costs": "roofline"}
    planned, _ = planned_and_plain(mlp(), torch.randn(2, WIDTH), **options)
    runner = cast(Any, planned)._rematplan
    alive = []
    for rows in (*range(2, 16), 15, 2):
        planned(torch.randn(rows, WIDTH)).sum().backward()
        alive.append(weakref.ref(runner.last))
    gc.collect()
    stats = rematplan.planning(planned).stats()
    assert (stats.plans, stats.captures, stats.open_captures) == (5, 1, 1)
    assert stats.dropped == stats.captures + stats.instances - stats.plans
    assert sum(ref() is not None for ref in alive) <= 7  # the last one was used twice
    assert len(runner.plans.recent._used) <= 5


def test_many_ranges_of_lengths_leave_a_bounded_number_of_captures(monkeypatch: pytest.MonkeyPatch) -> None:
    """A model that repeats an op by a quotient of its length has a capture for each range of lengths."""
    monkeypatch.setattr(shape_options, "MAX_PLANS", 3)
    model = Of(lambda m, x: (x * m.w)[(None,) * (x.shape[1] // 20 + 1)].sum(0))
    options = {"strategy": "store_all", "budget": "1GiB", "costs": "roofline"}
    planned, plain = planned_and_plain(model, *sequence(2, 2), **options)
    captures = cast(Any, planned)._rematplan.captures
    alive: list[weakref.ref[Any]] = []
    for length in (n for begin in range(0, 100, 20) for n in (begin + 2, begin + 9, begin + 5)):
        batch = sequence(2, length)
        equal_after(lambda m, batch=batch: step_of(m, batch), planned, plain)
        kept = [forward for kind in captures.shapes.values() for forward in kind.forwards]
        assert len(kept) <= 3
        alive += [weakref.ref(one) for one in kept if all(ref() is not one for ref in alive)]
    del kept
    gc.collect()
    stats = rematplan.planning(planned).stats()
    assert (stats.open_captures, len(alive), stats.reasons) == (5, 5, ())
    assert sum(ref() is not None for ref in alive) == 3


def test_the_plans_used_last_are_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(shape_options, "MAX_PLANS", 2)
    planned, _ = planned_and_plain(mlp(), torch.randn(2, WIDTH))
    used = {}
    for rows in (2, 3, 2, 4):
        planned(torch.randn(rows, WIDTH))
        used[rows] = planned._rematplan.last
    kept = planned._rematplan.plans.all()
    assert [one is used[2] or one is used[4] for one in kept] == [True, True]
