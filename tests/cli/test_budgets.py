"""Budgets read from text."""

import problems
import pytest

from rematplan.ir import InfeasibleBudget, Op, Tensor, TrainingGraph, UsageError
from rematplan.planner.auto.auto_strategy import Auto
from rematplan.planner.caches.plan_store import PlanStore
from rematplan.planner.core.strategy import Strategy
from rematplan.planner.strategies.anneal import Anneal
from rematplan.planner.strategies.chen_sqrt import ChenSqrt
from rematplan.planner.strategies.ilp import ILP
from rematplan.plans.budget_searches import least_plan, plan_within
from rematplan.plans.budgets import parse_budget, parse_loss_memory, unit_missing


@pytest.mark.parametrize(
    ("text", "wanted"),
    [
        ("0", 0),
        ("123456", 123456),
        ("7B", 7),
        ("1kB", 1000),
        ("512MB", 512 * 10**6),
        ("4GiB", 4 * 2**30),
        ("4gib", 4 * 2**30),
        ("4 GiB", 4 * 2**30),
        (" 2KiB ", 2048),
        ("1.5GiB", 3 * 2**29),
        ("0.1KiB", 102),  # rounded down
        ("60%", 599),  # of 999, rounded down
        ("100%", 999),
        ("33.3 %", 332),
        ("150%", 1498),
        ("min", 77),
        ("MIN", 77),
    ],
)
def test_budgets_in_bytes(text: str, wanted: int) -> None:
    assert parse_budget(text).bytes(999, lambda: 77) == wanted


def test_a_large_percentage_is_exact() -> None:
    peak = 2**60 + 1
    assert parse_budget("100%").bytes(peak, lambda: 0) == peak


def test_the_smallest_is_asked_for_only_when_needed() -> None:
    def never() -> int:
        raise AssertionError

    assert parse_budget("60%").bytes(10, never) == 6


def test_min_may_exceed_the_smallest_peak_by_one_percent_and_least_may_not() -> None:
    assert parse_budget("min").bytes(10, lambda: 1000) == 1010
    assert parse_budget(" Least ").bytes(10, lambda: 1000) == 1000


@pytest.mark.parametrize(
    "strategy", [Auto(time_limit=0.1), Anneal(time_limit=0.1), ILP(time_limit=0.1), ChenSqrt()]
)
def test_min_is_no_dearer_than_least_and_no_plan_that_is_known_is_smaller(strategy: Strategy) -> None:
    graph, store = problems.unet(3), PlanStore()
    least = least_plan(strategy, graph, kind="least", store=store)
    cheap = least_plan(strategy, graph, kind="min", store=store)
    assert cheap.estimate.peak <= 1.01 * least.estimate.peak
    assert cheap.estimate.cost <= least.estimate.cost
    again = least_plan(strategy, graph, kind="least", starts=[cheap, least])
    assert again.estimate.peak <= min(cheap.estimate.peak, least.estimate.peak)
    assert (found := store.get(graph, "least"))
    assert found.schedule == least.schedule


def test_a_refusal_does_not_outlive_the_plan_that_fits() -> None:
    graph, store = problems.unet(3), PlanStore()
    least = least_plan(ChenSqrt(), graph, kind="least")
    with pytest.raises(InfeasibleBudget):
        plan_within(ChenSqrt(), graph, least.estimate.peak - 1, store=store)
    smaller = least_plan(Auto(time_limit=0.1), graph, kind="least", store=store)
    assert smaller.estimate.peak < least.estimate.peak
    plan = plan_within(Auto(time_limit=0.1), graph, smaller.estimate.peak, store=store)
    assert plan.estimate.peak <= smaller.estimate.peak


@pytest.mark.parametrize(
    ("text", "wanted"),
    [
        ("50% of activations", 699),  # 400 and half of the other 599, rounded down
        ("50 % OF ACTIVATIONS ", 699),
        ("0% of activations", 400),
        ("100% of activations", 999),
        ("12.5% of activations", 474),
    ],
)
def test_a_share_of_activations_leaves_inputs_and_outputs_whole(text: str, wanted: int) -> None:
    assert parse_budget(text).bytes(999, lambda: 77, 400) == wanted


def small_step() -> TrainingGraph:
    """A parameter, a batch, two activations, a gradient; the gradient may be made once both are there."""
    return TrainingGraph(
        name="small",
        tensors=(Tensor("w", 100), Tensor("x", 20), Tensor("a", 40), Tensor("b", 8), Tensor("dw", 100)),
        inputs=("w", "x"),
        outputs=("dw",),
        ops=(
            Op("first", reads=("w", "x"), writes=("a",), cost=1),
            Op("second", reads=("a",), writes=("b",), cost=1),
            Op("last", reads=("a", "b"), writes=("dw",), cost=1),
        ),
    )


def test_inputs_and_outputs_are_those_of_the_problem() -> None:
    graph = small_step()
    assert parse_budget("100%").of(graph) == 268
    assert parse_budget("100% of activations").of(graph) == 268
    assert parse_budget("50% of activations").of(graph) == 220 + 24
    assert parse_budget("0% of activations").of(graph) == 220


def test_loss_memory_cannot_be_a_share_of_activations() -> None:
    with pytest.raises(UsageError, match="loss_memory"):
        parse_loss_memory("50% of activations")


@pytest.mark.parametrize("text", ["1", "50", " 100 "])
def test_a_small_number_alone_is_asked_about(text: str) -> None:
    asked, number = unit_missing(parse_budget(text), small_step()), text.strip()
    assert f"was {number}GiB or {number}% (of" in asked


def test_no_percentage_above_100_is_suggested() -> None:
    asked = unit_missing(parse_budget("120"), small_step())
    assert "was 120MiB meant" in asked
    assert "%" not in asked


@pytest.mark.parametrize("text", ["0", "121", "50B", "0.05kB", "50%", "50% of activations", "min", "50GiB"])
def test_numbers_with_a_unit_and_plausible_bytes_are_not_asked_about(text: str) -> None:
    assert not unit_missing(parse_budget(text), small_step())
