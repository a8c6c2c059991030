"""Pictures are truthful: auto is nowhere above another strategy, no plan is inside the shaded region, and rows that
do not fit are marked.
"""

from pathlib import Path

import pytest

import rematplan
from rematplan.cli import main
from rematplan.ir import TrainingGraph
from rematplan.planner.bounds.bound_search import lower_bound
from rematplan.planner.bounds.cut_bounds import min_peak_bound
from rematplan.planner.core.plan import Plan
from rematplan.planner.registry import strategy
from rematplan.plans.tradeoff import trace_curves
from rematplan.report.plot import Floors, MeasuredPoint, _Picture, _proven, save_trade_off

Curves = dict[str, tuple[Plan, ...]]


@pytest.fixture(scope="module")
def graph() -> TrainingGraph:
    loaded = rematplan.load_step("unet", sizes=rematplan.Sizes(batch=2, image=32, width=4))
    return rematplan.problem(loaded)


@pytest.fixture(scope="module")
def curves(graph: TrainingGraph) -> Curves:
    named = {name: strategy(name, time_limit=0.3) for name in ("auto", "chen_sqrt", "exact_dp")}
    peak = rematplan.no_recompute(graph).estimate.peak
    return trace_curves(graph, named, [peak * 9 // 10])[0]


def least_overhead(plans: tuple[Plan, ...], budget: int) -> float:
    return min((p.estimate.overhead for p in plans if p.estimate.peak <= budget), default=float("inf"))


def test_auto_is_nowhere_above_another_strategy(curves: Curves) -> None:
    for plans in curves.values():
        for plan in plans:
            budget = plan.estimate.peak
            assert least_overhead(curves["auto"], budget) <= plan.estimate.overhead + 1e-9


def test_no_plan_is_in_the_shaded_region(graph: TrainingGraph, curves: Curves) -> None:
    base = rematplan.no_recompute(graph).estimate.peak
    known = tuple((b, lower_bound(graph, b, 0.3).overhead) for b in (base, base * 9 // 10))
    every = [p for plans in curves.values() for p in plans]
    floor = _proven(Floors(0, known), every, 1)
    assert floor == sorted(floor)
    assert [y for _, y in floor] == sorted((y for _, y in floor), reverse=True)
    for plan in every:
        assert plan.estimate.peak >= min_peak_bound(graph).bytes
        proven = [y for budget, y in floor if plan.estimate.peak <= budget]
        assert not proven or 100 * plan.estimate.overhead >= max(proven) - 1e-4


def test_the_axis_is_cut_where_one_small_budget_would_flatten_all_else(
    graph: TrainingGraph, curves: Curves, tmp_path: Path
) -> None:
    base = rematplan.no_recompute(graph)
    picture = _Picture(curves, base, [MeasuredPoint(base.estimate.peak, -0.1, 0.0, 0.2)], Floors())
    assert picture.cut >= 20.0  # every measured point is shown whole
    assert picture.bottom <= -10.0
    save_trade_off(tmp_path / "t.png", "small", curves, base)
    assert (tmp_path / "t.png").read_bytes().startswith(b"\x89PNG")


def test_a_comparison_says_which_rows_fit(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    png = tmp_path / "c.png"
    network = [
        *("unet", "--dim", "batch=4", "--dim", "image=64", "--dim", "width=8", "--costs", "roofline"),
        *("--no-run",),
    ]
    assert main(["compare", *network, "--budget", "80%", "-S", "time_limit=0.2", "--png", str(png)]) == 0
    rows = [line.split() for line in capsys.readouterr().out.splitlines() if line.startswith("  ")]
    fits = {row[0]: "no" if "no" in row else "yes" for row in rows if "yes" in row or "no" in row}
    assert fits["store"] == "no"
    assert fits["auto"] == "yes"
    assert png.read_bytes().startswith(b"\x89PNG")
