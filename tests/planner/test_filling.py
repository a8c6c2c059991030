"""Plans between known ones: within their budgets, cheaper than what is known there, and the same for the same moves."""

from __future__ import annotations

import time

import problems
import pytest

from rematplan.planner.annealing.filling import plans_between
from rematplan.planner.auto.smallest_peak_search import find_smallest_peak
from rematplan.planner.core import effort as module
from rematplan.planner.core.effort import Effort
from rematplan.planner.core.schedule import runs_of
from rematplan.planner.core.simulator import simulate
from rematplan.planner.core.strategy import pareto
from rematplan.planner.strategies.store_all import no_recompute


@pytest.mark.parametrize("graph", [problems.residual((3, 4)), problems.unet(4)], ids=["residual", "unet"])
def test_plans_fill_a_curve_between_its_ends(graph) -> None:
    base = no_recompute(graph)
    low = find_smallest_peak(graph, Effort(moves=20_000))
    found = plans_between(graph, [low, base], Effort(moves=120_000), count=12)
    for plan in found:
        assert plan.budget is not None
        assert simulate(graph, plan.schedule).peak == plan.peak <= plan.budget
    front = pareto([low, base, *found])
    assert len(front) > 4
    assert (front[0].estimate.cost, front[-1].peak) == (base.estimate.cost, low.peak)


def test_counted_moves_fill_the_same_curve_however_busy_the_machine_is(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    graph = problems.residual((2, 2))
    base = no_recompute(graph)
    known = [find_smallest_peak(graph, Effort(moves=10_000)), base]

    def found() -> list[tuple[str, ...]]:
        plans = plans_between(graph, known, Effort(moves=40_000), count=8)
        return [tuple(runs_of(plan.schedule)) for plan in plans]

    quiet, real = found(), time.thread_time
    monkeypatch.setattr(module.time, "thread_time", lambda: 100 * real())
    assert found() == quiet


def test_ctrl_c_keeps_the_plans_found_so_far() -> None:
    graph = problems.residual((3, 4))
    base = no_recompute(graph)
    known = [find_smallest_peak(graph, Effort(moves=10_000)), base]
    whole = plans_between(graph, known, Effort(moves=60_000), count=12)

    def press(done: float, _: str) -> None:
        if done >= 0.5:
            raise KeyboardInterrupt

    some = plans_between(graph, known, Effort(moves=60_000), press, count=12)
    assert 0 < len(some) < len(whole)
    assert [runs_of(plan.schedule) for plan in some] == [
        runs_of(plan.schedule) for plan in whole[: len(some)]
    ]
