"""The commands ``rematplan plan`` and ``rematplan curve`` for a range of sizes, such as ``--dim batch=1..64``."""

from __future__ import annotations

import argparse
import csv
import io
import time
from collections.abc import Sequence
from typing import Any

from rematplan.cli.arguments import one_strategy, strategy_options
from rematplan.cli.output import Output
from rematplan.cli.problem_source import load
from rematplan.ir import ModelError, TrainingGraph, UnfitSizes, UsageError
from rematplan.ir.files import write_whole
from rematplan.planner.auto.auto_strategy import Auto
from rematplan.planner.caches.plan_store import PlanStore
from rematplan.planner.family.range_proof import RangeRow
from rematplan.planner.registry import strategy
from rematplan.planner.strategies.store_all import no_recompute
from rematplan.plans.budget_searches import least_plan
from rematplan.plans.budgets import Budget, parse_budget
from rematplan.plans.range_planning import RangePlan, plan_range
from rematplan.plans.size_ranges import ProblemRange, problems_over
from rematplan.plans.two_lane_plans import OFF
from rematplan.report.tables import range_table

BUDGETS = ("80%", "60%", "40%")
"""The budgets of ``rematplan curve`` for a range of sizes if none is stated. A percentage is of the largest peak
without recomputation among the captured sizes."""
COLUMNS = ("budget_bytes", "size", "fits", "predicted_peak_bytes", "overhead_percent", "captured")


def spanned(args: argparse.Namespace) -> tuple[str, range] | None:
    """Return the dimension with a range in ``--dim``, and the range, or None; `UsageError` if there are two."""
    found = [(name, sizes) for name, sizes in args.dim or () if isinstance(sizes, range)]
    if len(found) > 1:
        raise UsageError(f"--dim {found[1][0]}: one dimension may have a range, and {found[0][0]} has one")
    return found[0] if found else None


def plan_sizes(args: argparse.Namespace, out: Output) -> int:
    """Run ``rematplan plan`` for a range: plan all sizes, show a table, and return 0; `UnfitSizes` if some have no
    plan. `UsageError` for ``--output`` or ``--problem-out``, two lanes, or another strategy than ``auto``."""
    for option, file in (("--output", args.output), ("--problem-out", args.problem_out)):
        if file:
            raise UsageError(f"{option}: a file is for one size; plan one size of the range for it")
    auto = one_strategy(args)
    if auto.two_lanes != OFF:
        raise UsageError("two_lanes goes with one size, not with a range")
    if not isinstance(auto, Auto):
        raise UsageError(f"--strategy {auto.name} plans one size; a range of sizes takes {Auto.name}")
    budget = parse_budget(args.budget)
    problems, notes = _problems(args, out)
    start = time.perf_counter()
    with out.progress(f"planning {_title(problems)}") as progress:
        plan = plan_range(problems, _bytes(budget, problems, auto), auto, progress)
    seconds = time.perf_counter() - start
    out.show(*notes, range_table(_title(problems), plan))
    out.data(_document(problems, [plan], notes) | {"planning_seconds": seconds})
    if plan.refusal:
        raise UnfitSizes(plan.refusal)
    return 0


def draw_sizes(args: argparse.Namespace, out: Output) -> int:
    """Run ``rematplan curve`` for a range of sizes: show, and write if asked for, the overhead at each. Return the exit
    status 0. `UsageError` for ``--measure``, or another strategy than ``auto``."""
    if args.measure:
        raise UsageError("--measure goes with one size, not with a range")
    if set(args.strategy or (Auto.name,)) != {Auto.name}:
        raise UsageError(f"a range of sizes is planned by {Auto.name} alone")
    auto = strategy(Auto.name, **strategy_options(args))
    assert isinstance(auto, Auto)
    budgets = [parse_budget(text) for text in dict.fromkeys(args.budget or BUDGETS)]
    problems, notes = _problems(args, out)
    plans, store = [], PlanStore()  # a plan for one budget may be the best at some sizes for another
    for budget in budgets:
        with out.progress(f"planning {_title(problems)} within {budget.text}") as progress:
            plans.append(plan_range(problems, _bytes(budget, problems, auto), auto, progress, store))
    out.show(*notes, *(range_table(_title(problems), plan) for plan in plans))
    if args.csv:
        write_whole(args.csv, _csv(plans))
    if args.png:
        from rematplan.report.plot import save_range  # matplotlib is slow to load

        save_range(args.png, f"{_title(problems)}: a training step by {problems.dimension}", plans)
    out.data(_document(problems, plans, notes) | {"files": {"png": args.png, "csv": args.csv}})
    return 0


def _problems(args: argparse.Namespace, out: Output) -> tuple[ProblemRange, tuple[str, ...]]:
    """Return the planning problems of all sizes of the range that ``--dim`` states, and notes for the user. A
    `ModelError` names the size at which it was raised."""
    found = spanned(args)
    assert found is not None
    name, sizes = found
    others = [(other, size) for other, size in args.dim if not isinstance(size, range)]
    notes: dict[str, None] = {}

    def capture(size: int) -> TrainingGraph:
        try:
            source = load(argparse.Namespace(**{**vars(args), "dim": [*others, (name, size)]}), out)
        except ModelError as error:
            raise ModelError(f"--dim {name}={size}: {error}") from error
        notes.update(dict.fromkeys(source.notes))
        return source.graph

    problems = problems_over(name, sizes, capture)
    return problems, tuple(notes)


def _title(problems: ProblemRange) -> str:
    return problems.captured[problems.sizes[-1]].name


def _bytes(budget: Budget, problems: ProblemRange, auto: Auto) -> int:
    """Return the bytes for all sizes, from the captured problem with the largest peak without recomputation."""
    largest = max(problems.captured.values(), key=lambda graph: no_recompute(graph).estimate.peak)
    return budget.of(largest, lambda: least_plan(auto, largest, kind="least").estimate.peak)


def _document(problems: ProblemRange, plans: Sequence[RangePlan], notes: Sequence[str]) -> dict[str, Any]:
    """Return the JSON output for a range of sizes: for each budget, the figures of the best plan at each size."""
    return {
        "problem": _title(problems),
        "notes": list(notes),
        "dimension": problems.dimension,
        "sizes": [problems.sizes[0], problems.sizes[-1]],
        "captured": list(problems.captured),
        "ranges": [
            {
                "budget": plan.proof.budget,
                "plans": plan.members,
                "unfit": list(plan.proof.unfit),
                "table": [_row(plan, row) for row in plan.proof.rows],
            }
            for plan in plans
        ],
    }


def _row(plan: RangePlan, row: RangeRow[int]) -> dict[str, Any]:
    """Return the JSON output for one size: of the cheapest plan that fits, else of the smallest peak."""
    return {
        "size": row.size,
        "fits": row.fits,
        "proven_unfit": row.size in plan.proven,
        "captured": row.size in plan.captured,
        "no_recompute_peak": row.base_peak,
        "peak": row.estimate.peak,
        "overhead": row.estimate.overhead,
        "ops_recomputed": row.estimate.reruns,
        "strategy": row.member.strategy,
    }


def _csv(plans: Sequence[RangePlan]) -> str:
    """Return the rows of all proofs as CSV text, one for each budget and size."""
    out = io.StringIO()
    writer = csv.writer(out, lineterminator="\n")
    writer.writerow(COLUMNS)
    for plan in plans:
        for row in plan.proof.rows:
            e = row.estimate
            known = (e.peak, f"{100 * e.overhead:.4f}", int(row.size in plan.captured))
            writer.writerow((plan.proof.budget, row.size, int(row.fits), *known))
    return out.getvalue()
