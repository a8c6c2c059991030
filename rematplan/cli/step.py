"""``rematplan step``: run a planned training step, measure it, and compare it with plain autograd."""

from __future__ import annotations

import argparse
import sys
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rematplan.cli.arguments import one_strategy, positive
from rematplan.cli.output import VERIFICATION_FAILED, Output
from rematplan.cli.plan import add_budget, plan_document, plan_for
from rematplan.cli.problem_source import add_costs, add_model, load
from rematplan.ir import UsageError
from rematplan.planner.core.plan import Plan
from rematplan.planner.strategies.store_all import no_recompute
from rematplan.plans.budgets import parse_budget
from rematplan.report.tables import plan_table, split_table, step_table

if TYPE_CHECKING:
    from rematplan.api import LoadedStep, StepReport


def add(parser: argparse.ArgumentParser) -> None:
    """Add the arguments of ``rematplan step`` to ``parser``."""
    add_model(parser, problem_file=False)
    add_costs(parser)
    add_budget(parser, required=False)
    parser.add_argument(
        "--plan",
        type=Path,
        metavar="PLAN.json",
        help="run the plan in this file, instead of planning; it must be of the same model",
    )
    parser.add_argument(
        "--steps", type=positive, default=3, metavar="N", help="number of steps to time; default 3"
    )
    parser.add_argument(
        "--verify",
        action="store_true",
        help="compare loss, every gradient and every buffer with plain autograd: bit by bit, or within the predicted "
        "error if the plan uses inverses that round",
    )


def run(args: argparse.Namespace, out: Output) -> int:
    """Run ``rematplan step``: plan the model's step or load a plan, run it, and print its measurements. The exit status
    is 1 if ``--verify`` found a larger difference than the plan predicts, else 0. `UsageError` unless either a budget
    or a plan is stated."""
    if (args.budget is None) == (args.plan is None):
        raise UsageError("state a --budget or a --plan file, not both")
    if args.budget is not None:
        parse_budget(args.budget)
    one_strategy(args)
    from rematplan.api import predicted_error

    source, plan = plan_for(load(args, out, runs=True), args, out)
    loaded = source.loaded
    assert loaded is not None
    source = replace(source, notes=(*source.notes, *_added_loss(loaded, args.loss)))
    base = no_recompute(source.graph)
    error = predicted_error(loaded, plan)
    out.show(
        *source.notes, split_table(source.graph, base, plan), plan_table(source.graph, plan, base, error)
    )
    report = run_plan(loaded, plan, out, args.steps, args.verify)
    out.data(plan_document(source, plan, base) | step_document(report))
    return exit_status(report)


def _added_loss(loaded: LoadedStep, stated: str | None) -> tuple[str, ...]:
    """Return a note that names the loss if the user stated none, else an empty tuple."""
    if stated is not None:
        return ()
    loss = loaded.module.loss
    return (f"{loaded.step.name}: the loss is {loss.name}, {loss.summary}; choose another with --loss",)


def run_plan(loaded: LoadedStep, plan: Plan, out: Output, steps: int, check: bool) -> StepReport:
    """Run a step by a plan ``steps`` times, compared with autograd if ``check``; print and return what was measured."""
    from rematplan import api

    with out.progress("running") as progress:
        report = api.run_step(loaded, plan, steps=steps, check=check, progress=progress)
    out.show(step_table(loaded.step.name, report))
    return report


def exit_status(report: StepReport) -> int:
    """Return 1, after printing the differences, if a verification failed; 0 if it passed or was not asked for."""
    if report.verification is None or report.verification.passed:
        return 0
    print(f"rematplan: {report.verification}", file=sys.stderr)
    return VERIFICATION_FAILED


def step_document(report: StepReport) -> dict[str, Any]:
    """Return the JSON output of a step: peaks in bytes, times in seconds, the losses and the verification."""
    checked = report.verification
    return {
        "measured_peak": report.measured_peak,
        "eager_peak": report.eager_peak,
        "seconds": report.seconds,
        "eager_seconds": report.eager_seconds,
        "one_lane_seconds": report.one_lane_seconds,
        "losses": list(report.losses),
        "verification": None
        if checked is None
        else {
            "bit_equal": checked.bit_equal,
            "passed": checked.passed,
            "error": checked.error,
            "predicted_error": checked.predicted,
            "compared": checked.compared,
            "differences": [
                {"name": d.name, "absolute": d.absolute, "relative": d.relative} for d in checked.differences
            ],
        },
    }
