"""Strategies by name, their options, and the errors for wrong ones."""

from __future__ import annotations

import pytest

from rematplan.ir import UsageError
from rematplan.planner.registry import STRATEGIES, strategy


def test_every_strategy_has_its_name_and_a_summary():
    assert {"auto", "store_all", "chen_sqrt", "chen_greedy", "approx_dp", "exact_dp"} <= set(STRATEGIES)
    for name, kind in STRATEGIES.items():
        assert kind.name == name
        assert kind.summary
        assert strategy(name) == kind()


def test_options_are_fields_and_read_from_text():
    assert strategy("exact_dp", objective="memory", ticks="50").ticks == 50
    assert strategy("exact_dp", max_lower_sets=7).max_lower_sets == 7


@pytest.mark.parametrize(
    ("name", "options", "message"),
    [
        ("nonsense", {}, "unknown strategy 'nonsense'; known: auto, .*exact_dp"),
        (
            "exact_dp",
            {"colour": 1},
            "exact_dp: no option is named 'colour'; its options are two_lanes, lane_speed, objective, ticks",
        ),
        (
            "store_all",
            {"grid": 1},
            "store_all: no option is named 'grid'; its options are two_lanes, lane_speed",
        ),
        ("exact_dp", {"objective": "speed"}, "objective is 'speed'; it must be one of time, memory"),
        ("exact_dp", {"ticks": "many"}, "ticks is 'many', not of type int"),
        ("exact_dp", {"ticks": True}, "ticks is True, not of type int"),
        ("exact_dp", {"ticks": 1.5}, "ticks is 1.5, not of type int"),
        ("auto", {"time_limit": "nan"}, "time_limit is nan, not a finite number"),
        ("anneal", {"time_limit": float("inf")}, "time_limit is inf, not a finite number"),
        ("auto", {"time_limit": -1}, "time_limit is -1; it must be above 0"),
        ("exact_dp", {"ticks": 0}, "ticks is 0; it must be at least 1"),
        ("approx_dp", {"budgets": -1}, "budgets is -1; it must be at least 1"),
        ("exact_dp", {"max_lower_sets": 1}, "max_lower_sets is 1; it must be at least 2"),
        ("chen_greedy", {"grid": 0}, "grid is 0; it must be at least 1"),
        ("ilp", {"upstream": -1}, "upstream is -1; it must be at least 0"),
    ],
)
def test_errors_for_wrong_names_and_options_list_the_right_ones(name, options, message):
    with pytest.raises(UsageError, match=message):
        strategy(name, **options)


@pytest.mark.parametrize("name", STRATEGIES)
def test_every_strategy_takes_a_time_limit(name):
    assert getattr(strategy(name, time_limit="2"), "time_limit", 2.0) == 2.0


def test_auto_is_as_good_as_each_strategy_it_runs(problems):
    graph = problems.residual((2, 2))
    kinds = [strategy(n) for n in STRATEGIES if n.endswith("_dp") or n.startswith("chen") or n == "store_all"]
    curves = [kind.curve(graph, ()) for kind in kinds]
    peaks = sorted(p.estimate.peak for curve in curves for p in curve)
    for budget in peaks[:: max(1, len(peaks) // 8)]:
        best = min(p.estimate.cost for curve in curves for p in curve if p.estimate.peak <= budget)
        found = strategy("auto", time_limit=0.2).plan(graph, budget)
        assert found.estimate.peak <= budget == found.budget
        assert found.estimate.cost <= best
