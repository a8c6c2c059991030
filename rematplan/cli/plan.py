"""``rematplan plan``: make a plan within a budget, show it, and write the requested files."""

from __future__ import annotations

import argparse
import time
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rematplan.cli.arguments import add_strategy_options, check_outputs, one_strategy, strategy_options
from rematplan.cli.output import Output
from rematplan.cli.problem_source import Source, add_costs, add_model, costs_of, load
from rematplan.cli.rewriting import add_rewriting, refuse_rewriting, stated_rewriting
from rematplan.cli.size_range import plan_sizes, spanned
from rematplan.ir import InfeasibleBudget, TrainingGraph, save_problem
from rematplan.planner.core.inversion_error import inverses_run, worst_error
from rematplan.planner.core.plan import Plan, save_plan
from rematplan.planner.core.schedule import runs_of
from rematplan.planner.core.strategy import Progress, Strategy
from rematplan.planner.overlap.place_on_lanes import saved
from rematplan.planner.peak_report import peak_cause
from rematplan.planner.registry import STRATEGIES
from rematplan.planner.strategies.store_all import no_recompute
from rematplan.plans.budget_searches import least_plan, plan_within
from rematplan.plans.budgets import Budget, parse_budget, unit_missing
from rematplan.plans.two_lane_plans import overlapped, stated_sharing
from rematplan.report.tables import ladder_table, pairs_table, plan_table, split_for_people, split_table

if TYPE_CHECKING:
    from rematplan.plans.options import PlanOptions
    from rematplan.plans.planner import Planner


def add(parser: argparse.ArgumentParser) -> None:
    """Add the arguments of ``rematplan plan`` to ``parser``."""
    add_model(parser, problem_file=True, ranges=True)
    add_costs(parser)
    add_budget(parser)
    parser.add_argument("-o", "--output", type=Path, metavar="PLAN.json", help="write the plan")
    parser.add_argument("--problem-out", type=Path, metavar="PROBLEM.json", help="write the planning problem")


def add_budget(parser: argparse.ArgumentParser, *, required: bool = True) -> None:
    """Add options of a search: budget, strategy, splits and kernels. ``required``: whether ``--budget`` is required."""
    parser.add_argument(
        "--budget",
        required=required,
        metavar="SIZE",
        help="memory for everything the step holds: 4GiB, 512MB, a number of bytes, 60%% (of the no-recompute peak), "
        "'50%% of activations' (inputs and gradients whole, and half of the rest), least for the smallest peak "
        "found, or min for the cheapest plan within 1 %% of it",
    )
    parser.add_argument(
        "--strategy",
        default="auto",
        metavar="NAME",
        help=f"one of {', '.join(STRATEGIES)} (see below); default auto",
    )
    add_rewriting(parser)
    add_strategy_options(parser)


def run(args: argparse.Namespace, out: Output) -> int:
    """Run ``rematplan plan``: plan the step within the budget, show the plan, and write the requested files. Return the
    exit status 0."""
    check_outputs(args.output, args.problem_out)
    parse_budget(args.budget)  # refuses a malformed budget before the model is loaded
    one_strategy(args)
    if spanned(args):
        refuse_rewriting(args, "cannot be combined with a range of sizes; state one size")
        return plan_sizes(args, out)
    opened = source = load(args, out)
    if args.problem_out:
        save_problem(source.graph, args.problem_out)
    start = time.perf_counter()
    source, plan = plan_for(source, args, out)
    if args.problem_out and source.graph != opened.graph:
        save_problem(source.graph, args.problem_out)
    base = no_recompute(source.graph)
    seconds = time.perf_counter() - start
    if args.output:
        save_plan(replace(plan, fingerprint=source.graph.fingerprint), args.output, source.graph)
    out.show(
        *source.notes,
        split_table(source.graph, base, plan),
        plan_table(source.graph, plan, base, _error(source, plan)),
    )
    if parse_budget(args.budget).is_lean:
        out.show(pairs_table("What bounds the peak", peak_cause(source.graph, plan).rows()))
        if len(plan.near) > 1:
            out.show(ladder_table(plan))
    files = {"plan": args.output, "problem": args.problem_out}
    out.show(*(f"{what}: {path}" for what, path in files.items() if path))
    document = plan_document(source, plan, base)
    out.data(document | {"planning_seconds": seconds, "files": files})
    return 0


def _error(source: Source, plan: Plan) -> float:
    """Return the largest predicted relative error by inverses of the forward tensors that the backward reads."""
    if source.loaded is None:
        return worst_error(source.graph, plan.schedule)
    from rematplan.api import predicted_error

    return predicted_error(source.loaded, plan)


def plan_for(source: Source, args: argparse.Namespace, out: Output) -> tuple[Source, Plan]:
    """Plan a problem as the arguments say, or load the plan that they name. Return the problem, with notes, and its
    plan; `InfeasibleBudget` if no plan is found. With inverses that round, the plan may belong to the step without
    them."""
    graph, stated = source.graph, args.budget
    asking = asking_for_units(parse_budget(stated), graph) if stated else nullcontext()
    if source.loaded is None:
        refuse_rewriting(args, "needs a model; the ops of a problem file cannot be run")
        strategy, budget = one_strategy(args), parse_budget(stated)
        with asking, out.progress(f"planning {graph.name}") as progress:
            if budget.is_lean:
                plan = least_plan(strategy, graph, progress, kind=budget.kind)
            else:
                plan = plan_within(strategy, graph, budget.of(graph), progress)
            plan, notes = overlapped(graph, plan, strategy.two_lanes, lambda: stated_sharing(strategy))
            return replace(source, notes=(*source.notes, *notes)), plan
    from rematplan.plans.planner import Planner

    planner = Planner(plan_options(args), named=source.loaded.named)
    with asking, out.progress(f"planning {graph.name}") as progress:
        found, plan = planned(source, planner, progress)
    rounds = any(inverse.noise for inverse in found.graph.inverses)
    if source.loaded.inexact and not rounds and args.inverses and args.budget:
        said = f"{graph.name}: no plan with inverses was found that is better than this one without them"
        found = replace(found, notes=(said, *found.notes))
    return found, plan


def planned(source: Source, planner: Planner, progress: Progress) -> tuple[Source, Plan]:
    """Plan a captured step, and return its problem, with notes, and its plan; `InfeasibleBudget` if none is found."""
    loaded = source.loaded
    assert loaded is not None
    found = planner.plan(loaded.bare, progress=progress)
    assert found.problem is not None
    rounds = any(inverse.noise for inverse in found.problem.inverses)
    loaded = replace(loaded, step=found.step, inexact=(loaded.inexact and rounds) or found.rounds)
    return Source(found.problem, loaded, (*source.notes, *found.notes)), found.plan


def plan_options(args: argparse.Namespace) -> PlanOptions:
    """Return the options of planning that the arguments state."""
    from rematplan.plans.options import RAISE, PlanOptions, SavedPlan

    strategy: Strategy = one_strategy(args)  # refuses an option that the strategy does not have
    if getattr(args, "plan", None):
        lanes = strategy.two_lanes if "two_lanes" in strategy_options(args) else None
        strategy = SavedPlan(args.plan, two_lanes=lanes, lane_speed=strategy.lane_speed)
    return PlanOptions(
        budget=args.budget,
        strategy=strategy,
        costs=costs_of(args),
        inverses=args.inverses,
        on_infeasible=RAISE,
        refine=False,
        **stated_rewriting(args),
    )


@contextmanager
def asking_for_units(budget: Budget, graph: TrainingGraph) -> Iterator[None]:
    """A context that asks, in an `InfeasibleBudget` for a small number without a unit, whether GiB or percent were
    meant."""
    try:
        yield
    except InfeasibleBudget as e:
        hint = unit_missing(budget, graph)
        if not hint:
            raise
        raise replace(e, hint=hint) from None


def plan_document(source: Source, plan: Plan, base: Plan) -> dict[str, Any]:
    """Return the figures of a plan as JSON data, without its schedule. Peaks are in bytes, costs in microseconds."""
    e = plan.estimate
    return {
        "problem": source.graph.name,
        "notes": list(source.notes),
        "ops": len(source.graph.ops),
        "strategy": plan.strategy,
        "status": plan.status,
        "budget": plan.budget,
        "no_recompute_peak": base.estimate.peak,
        "peak": e.peak,
        "cost": e.cost,
        "overhead": e.overhead,
        "lower_bound": plan.lower_bound,
        "gap": plan.gap,
        "ops_recomputed": e.reruns,
        "inversions": inverses_run(source.graph, runs_of(plan.schedule)),
        "inversion_error": worst_error(source.graph, plan.schedule),
        "runs": len(runs_of(plan.schedule)),
        "lanes": lanes_document(plan),
        "peak_cause": peak_cause(source.graph, plan).document(),
        "near": [{"peak": peak, "overhead": overhead} for peak, overhead in plan.near],
        "split": _split(source, plan),
        "split_no_recompute": _split(source, base),
    }


def lanes_document(plan: Plan) -> dict[str, Any] | None:
    """Return the figures of a plan's two lanes (CUDA streams or threads) as JSON data; None if it has only one lane."""
    if plan.lanes is None:
        return None
    lanes = plan.lanes
    return {
        "peak": lanes.peak,
        "makespan": lanes.makespan,
        "saved": saved(plan, plan.estimate.cost),
        "speed": lanes.speed,
        "recovery": len(lanes.recovery),
        "waits": len(lanes.waits),
    }


def _split(source: Source, plan: Plan) -> dict[str, int]:
    return {kind.replace(" ", "_"): n for kind, n in split_for_people(source.graph, plan).items()}
