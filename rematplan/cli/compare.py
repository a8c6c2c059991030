"""``rematplan compare``: compare strategies that keep, recompute or invert tensors: peaks, extra time, errors."""

from __future__ import annotations

import argparse
from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rematplan.cli.arguments import add_strategy_options, check_outputs, positive, strategy_options
from rematplan.cli.output import Output
from rematplan.cli.plan import planned
from rematplan.cli.problem_source import Source, add_costs, add_model, costs_of, load_model, price
from rematplan.ir import InfeasibleBudget
from rematplan.planner.auto.auto_strategy import Auto
from rematplan.planner.caches.plan_store import PlanStore
from rematplan.planner.core.inversion_error import inverses_run, worst_error
from rematplan.planner.core.plan import Plan
from rematplan.planner.core.schedule import runs_of
from rematplan.planner.core.strategy import Progress, Strategy
from rematplan.planner.registry import LIMIT, strategy
from rematplan.planner.strategies.chen_sqrt import ChenSqrt
from rematplan.planner.strategies.reversible import Reversible
from rematplan.planner.strategies.store_all import no_recompute
from rematplan.plans.budgets import parse_budget
from rematplan.plans.two_lane_plans import ON
from rematplan.report.comparison_row import Rival
from rematplan.report.tables import comparison_table
from rematplan.runtime.costs.device_models import PROFILE

if TYPE_CHECKING:
    from rematplan.plans.planner import Planner

SECONDS = 20.0
"""The default time limit of `auto`, for each of its plans."""
HALF = 50
"""The default budget of networks without inverses, in percent of the peak without recomputation."""


@dataclass(frozen=True)
class PlannedRival(Rival):
    """A row of the table that ``rematplan compare`` prints: a plan with its figures. ``source``: the problem to which
    the plan belongs."""

    source: Source = field(kw_only=True)


def add(parser: argparse.ArgumentParser) -> None:
    """Add the arguments of ``rematplan compare`` to ``parser``."""
    add_model(parser, problem_file=False)
    add_costs(parser)
    parser.add_argument(
        "--budget",
        metavar="SIZE",
        help="the budget of all strategies (written as for plan); default the smallest peak when everything is "
        "inverted, or half of the no-recompute peak if nothing can be inverted",
    )
    add_strategy_options(parser)
    parser.add_argument(
        "--steps", type=positive, default=3, metavar="N", help="number of steps to time; default 3"
    )
    parser.add_argument("--no-run", action="store_true", help="predict only, without running a step")
    parser.add_argument("--png", type=Path, metavar="FILE", help="draw peak against time and error")


def run(args: argparse.Namespace, out: Output) -> int:
    """Run ``rematplan compare``: plan a step by several strategies, run the plans unless ``--no-run`` is set, and show
    a table. The exit status is 1 if a plan's results differ by more than predicted, else 0."""
    check_outputs(args.png)
    auto = strategy(Auto.name, **{LIMIT: SECONDS, "two_lanes": ON, **strategy_options(args)})
    wanted = parse_budget(args.budget) if args.budget else None
    costs = costs_of(args)
    loaded = load_model(args, out, weightless=args.no_run and costs != PROFILE, inverses=True)
    from rematplan.plans.options import RAISE, PlanOptions
    from rematplan.plans.planner import Planner
    from rematplan.runtime.inversion.find_inverses import with_exact_inverses

    exact = replace(loaded, step=with_exact_inverses(loaded.bare), inexact=False)
    plain, inverted = (price(one, out, costs, args.inverses) for one in (exact, loaded))
    base = no_recompute(plain.graph)
    least = Reversible().curve(inverted.graph, ())[-1].estimate.peak
    default = least if least < base.estimate.peak else base.estimate.peak * HALF // 100
    budget = wanted.of(plain.graph, lambda: least) if wanted else default
    asked = PlanOptions(budget=budget, strategy=auto, costs=costs, on_infeasible=RAISE, refine=False)
    planner = Planner(asked, named=loaded.named)
    with out.progress(f"planning {plain.graph.name}") as progress:
        rivals = list(_rivals(plain, inverted, budget, planner, args.inverses or True, progress))
    if not args.no_run:
        rivals = _run(rivals, args.steps, out)
    out.show(*inverted.notes, comparison_table(plain.graph.name, budget, rivals))
    if args.png:
        from rematplan.report.plot_comparison import save_comparison  # matplotlib is slow to load

        save_comparison(args.png, f"{plain.graph.name}: keep, recompute or invert", rivals, budget)
    out.data(_document(plain, budget, rivals) | {"files": {"png": args.png}})
    checks = [r.report.verification for r in rivals if r.report]
    return int(not all(c.passed for c in checks if c))


def _rivals(
    plain: Source, inverted: Source, budget: int, planner: Planner, inverses: bool | float, progress: Progress
) -> Iterator[PlannedRival]:
    """Yield store all, √n checkpointing, `auto` without inverses; if an inverse rounds, reversible, and `auto` with
    ``inverses``; last, a plan of two lanes if one results. A strategy without a plan within the budget gives one for
    ``least``. ``planner``: each searched plan has its options, except strategy and inverses."""
    base = plain.graph.base_cost

    def asking(strategy: Strategy, inverses: bool | float = False) -> Planner:
        asked = replace(planner.options, strategy=strategy, inverses=inverses)
        return replace(planner, options=asked, store=PlanStore())

    def row(name: str, source: Source, plan: Plan) -> PlannedRival:
        time = plan.lanes.makespan if plan.lanes else plan.estimate.cost
        error = worst_error(source.graph, plan.schedule)
        return PlannedRival(name, plan, time / base - 1 if base else 0.0, error, source=source)

    def rival(name: str, source: Source, planner: Planner) -> PlannedRival:
        try:
            return row(name, *planned(source, planner, progress))
        except InfeasibleBudget:  # the row shows the smallest peak that the strategy finds
            return row(name, *planned(source, planner.within("least"), progress))

    auto, one_lane = planner.options.strategy, replace(planner.options.strategy, two_lanes="off")
    yield row("store all", plain, no_recompute(plain.graph))
    yield rival("√n checkpointing", plain, asking(ChenSqrt()))
    source, planner = plain, asking(one_lane)
    last = without = rival("auto without inverses", source, planner)
    yield without
    if any(inverse.noise for inverse in inverted.graph.inverses):
        yield rival("reversible", inverted, asking(Reversible(), inverses))
        source, planner = inverted, asking(one_lane, inverses)
        both = rival("auto with inverses", source, planner)
        # With inverses allowed, a plan without them may still be the better one.
        last = replace(min(both, without, key=lambda r: _rank(r.plan, budget)), name=both.name)
        yield last
    lanes = rival(
        f"{last.name}, overlap", source, replace(planner, options=replace(planner.options, strategy=auto))
    )
    if lanes.plan.lanes:
        yield lanes


def _rank(plan: Plan, budget: int) -> tuple[int, float]:
    """Return a sort key for plans: those within the budget (bytes) come first, by cost; others by peak and cost."""
    return max(plan.estimate.peak, budget), plan.estimate.cost


def _run(rivals: list[PlannedRival], steps: int, out: Output) -> list[PlannedRival]:
    """Run each rival's plan for ``steps`` steps, verify it, and return the rivals with their reports."""
    from rematplan import api

    done = []
    with out.progress("running") as progress:
        for k, rival in enumerate(rivals):
            progress(k / len(rivals), rival.name)
            assert rival.source.loaded is not None
            report = api.run_step(rival.source.loaded, rival.plan, steps=steps, check=True)
            done.append(replace(rival, report=report))
    return done


def _document(plain: Source, budget: int, rivals: list[PlannedRival]) -> dict[str, Any]:
    """Return the comparison as JSON data: a row of predicted figures for each rival, and measured ones if it has
    run."""
    rows = []
    for r in rivals:
        e = r.plan.estimate
        row: dict[str, Any] = {
            "strategy": r.name,
            "peak": r.plan.peak,
            "within_budget": r.plan.peak <= budget,
            "extra_time": r.extra,
            "ops_recomputed": e.reruns,
            "inversions": inverses_run(r.source.graph, runs_of(r.plan.schedule)),
            "inversion_error": r.error,
            "gradient_error": r.gradient_error,
        }
        if r.report:
            row |= {
                "measured_peak": r.report.measured_peak,
                "seconds": r.report.seconds,
                "one_lane_seconds": r.report.one_lane_seconds,
                "eager_peak": r.report.eager_peak,
                "eager_seconds": r.report.eager_seconds,
                "passed": r.report.verification.passed if r.report.verification else None,
            }
        rows.append(row)
    return {"problem": plain.graph.name, "budget": budget, "strategies": rows}
