"""Ranges of sizes: captured where need be, planned from the largest size down, each size's row true."""

from __future__ import annotations

from dataclasses import replace

import pytest

from rematplan.ir import TrainingGraph
from rematplan.planner.auto.auto_strategy import Auto
from rematplan.planner.bounds.cut_bounds import min_peak_bound
from rematplan.planner.core.simulator import simulate
from rematplan.planner.strategies.store_all import no_recompute
from rematplan.plans import size_ranges
from rematplan.plans.range_planning import plan_range
from rematplan.plans.size_ranges import ProblemRange, problems_over


class Maker:
    """A step whose tensors, except for weights, grow with the size; it notes which sizes were captured.

    ``special``: the size from which on the step has another op, and below which it has not. ``step``: what bytes are
    rounded up to.
    """

    def __init__(self, problems, layers: int = 6, special: int = 0, step: int = 1) -> None:
        self.graphs = problems.chain(layers), problems.chain(layers + 1)
        self.special, self.step = special, step
        self.captured: list[int] = []

    def at(self, size: int) -> TrainingGraph:
        """The problem at a size."""
        graph = self.graphs[size < self.special]
        inputs = set(graph.inputs)

        def bytes_of(n: int) -> int:
            return -(-n * size // self.step) * self.step

        tensors = (t if t.name in inputs else replace(t, bytes=bytes_of(t.bytes)) for t in graph.tensors)
        return replace(
            graph, tensors=tuple(tensors), ops=tuple(replace(op, cost=op.cost * size) for op in graph.ops)
        )

    def __call__(self, size: int) -> TrainingGraph:
        """Capture."""
        self.captured.append(size)
        return self.at(size)


def test_few_sizes_are_captured_and_all_problems_exact(problems):
    maker = Maker(problems)
    found = problems_over("batch", range(1, 65), maker)
    assert sorted(found.captured) == sorted(maker.captured)
    assert len(maker.captured) <= 8
    assert {size % 2 for size in maker.captured if 3 < size < 60} == {0, 1}
    for size in range(1, 65):
        assert found.problem(size).tensors == maker.at(size).tensors


def test_ops_that_differ_at_size_one_leave_the_others_computed(problems):
    maker = Maker(problems, special=2)
    found = problems_over("batch", range(1, 65), maker)
    assert len(maker.captured) <= 8
    assert len({found.problem(size).fingerprint for size in (1, 2, 33)}) == 2
    for size in range(1, 65):
        assert found.problem(size).tensors == maker.at(size).tensors


@pytest.mark.parametrize("change", [{"step": 12288}, {"special": 20}])
def test_sizes_that_are_not_known_are_captured(problems, change):
    maker = Maker(problems, **change)
    found = problems_over("batch", range(1, 33), maker)
    for size in range(1, 33):
        assert found.problem(size).tensors == maker.at(size).tensors
    assert len(maker.captured) == len(set(maker.captured)) > 12


def test_of_few_sizes_each_is_captured(problems):
    maker = Maker(problems)
    problems_over("batch", range(3, 3 + size_ranges.EACH), maker)
    assert maker.captured == list(range(3, 3 + size_ranges.EACH))


def planned(problems, budget_at, share, **change):
    maker = Maker(problems, **change)
    found = problems_over("batch", range(1, 25), maker)
    budget = int(share * no_recompute(maker.at(budget_at)).estimate.peak)
    return maker, plan_range(found, budget, Auto(time_limit=1.0, reuse=False)), budget


def test_a_plan_fits_at_every_size_and_each_row_is_true(problems):
    maker, plan, budget = planned(problems, 24, 0.6)
    assert plan.proof.holds
    assert [row.size for row in plan.proof.rows] == list(range(1, 25))
    assert plan.captured == set(maker.captured)
    (family,) = plan.families.values()
    for row in plan.proof.rows:
        here = maker.at(row.size)
        found = simulate(here, family.plan(here, row.member).schedule)
        assert (found.peak, found.reruns) == (row.estimate.peak, row.estimate.reruns)
        assert found.peak <= budget
        assert found.overhead == pytest.approx(row.estimate.overhead)
        if no_recompute(here).estimate.peak <= budget:
            assert row.estimate.overhead == pytest.approx(0.0)
    assert plan.proof.rows[-1].estimate.overhead > 0


def test_what_fits_nowhere_is_said_and_what_no_plan_can(problems):
    maker, plan, budget = planned(problems, 12, 0.5, special=2)
    unfit = plan.proof.unfit
    assert unfit
    assert unfit == tuple(range(unfit[0], 25))
    for size in range(1, 25):
        assert size in plan.proven or min_peak_bound(maker.at(size)).bytes <= budget  # searches prove more
        assert size not in plan.proven or size in unfit
    assert len(plan.families) == 2
    # A plan was needed for the last that fits.
    assert no_recompute(maker.at(unfit[0] - 1)).estimate.peak > budget


def test_where_everything_fits_nothing_is_searched(problems, monkeypatch):
    def no_search(*_, **__):
        raise AssertionError("the step fits as it is")

    monkeypatch.setattr(Auto, "plan", no_search)
    monkeypatch.setattr(Auto, "curve", no_search)
    _, plan, _ = planned(problems, 24, 1.0)
    assert plan.proof.holds
    assert {row.estimate.reruns for row in plan.proof.rows} == {0}


def test_a_size_outside_of_the_range_has_no_problem(problems):
    found = problems_over("batch", range(2, 40), Maker(problems))
    assert isinstance(found, ProblemRange)
    with pytest.raises(ValueError, match="not enough values"):
        found.problem(41)
