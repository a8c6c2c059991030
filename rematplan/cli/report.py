"""``rematplan report``: one HTML page about a plan, and its predicted allocations for two viewers."""

from __future__ import annotations

import argparse
from pathlib import Path

from rematplan.cli.arguments import check_outputs, one_strategy
from rematplan.cli.output import Output
from rematplan.cli.plan import add_budget, plan_document, plan_for
from rematplan.cli.problem_source import Source, add_costs, add_model, is_problem, load
from rematplan.ir import UsageError
from rematplan.ir.files import write_whole
from rematplan.planner.core.plan import Plan, load_plan, load_plan_with_problem
from rematplan.planner.strategies.store_all import no_recompute
from rematplan.plans.budgets import parse_budget


def add(parser: argparse.ArgumentParser) -> None:
    """Add the arguments of ``rematplan report`` to ``parser``."""
    add_model(parser, problem_file=True)
    add_costs(parser)
    add_budget(parser, required=False)
    parser.add_argument(
        "--plan", type=Path, metavar="PLAN.json", help="report on the plan in this file, instead of planning"
    )
    parser.add_argument("-o", "--output", type=Path, metavar="FILE.html", help="write the report")
    parser.add_argument(
        "--snapshot",
        type=Path,
        metavar="FILE.pickle",
        help="write the allocations for PyTorch's memory viewer",
    )
    parser.add_argument(
        "--trace", type=Path, metavar="FILE.json", help="write runs and allocations for Chrome's trace viewer"
    )


def run(args: argparse.Namespace, out: Output) -> int:
    """Run ``rematplan report``: plan the step or load its plan, and write the requested files. Return 0; `UsageError`
    if no file is requested."""
    files = {"report": args.output, "snapshot": args.snapshot, "trace": args.trace}
    check_outputs(*files.values())
    if not any(files.values()):
        raise UsageError("state a file to write: -o FILE.html, --snapshot FILE.pickle or --trace FILE.json")
    if args.budget is not None:
        parse_budget(args.budget)
    one_strategy(args)
    source, plan = _planned(args, out)
    write(source, plan, args.output, args.snapshot, args.trace, out)
    out.show(*source.notes, str(plan), *(f"{what}: {path}" for what, path in files.items() if path))
    out.data(plan_document(source, plan, no_recompute(source.graph)) | {"files": files})
    return 0


def _planned(args: argparse.Namespace, out: Output) -> tuple[Source, Plan]:
    """Return the problem and the plan of a plan file, or of a model or problem with a plan file or a budget; else
    `UsageError`."""
    if is_problem(args) and (found := load_plan_with_problem(args.model)):
        if args.budget is not None or args.plan is not None:
            raise UsageError(f"{args.model} is a plan; state neither --budget nor --plan")
        plan, graph = found
        return Source(graph, None, ()), plan
    if args.budget is not None and args.plan is not None:
        raise UsageError("state a --budget or a --plan file, not both")
    if args.budget is None and args.plan is None:
        raise UsageError(f"{args.model} is no plan: state a --budget or a --plan file")
    source = load(args, out)
    if args.plan is not None and source.loaded is None:
        return source, load_plan(args.plan, source.graph)
    return plan_for(source, args, out)


def write(
    source: Source, plan: Plan, output: Path | None, snapshot: Path | None, trace: Path | None, out: Output
) -> None:
    """Write the page ``output``, the ``snapshot`` for PyTorch's viewer and the ``trace`` for Chrome's; those that are
    None are left out."""
    from rematplan.plan_report import memory_trace
    from rematplan.plan_report.report import report, subject_of

    calls = [] if source.loaded is None else [*source.loaded.step.calls, *source.loaded.step.inverses]
    subject = subject_of(source.graph, plan, calls)
    if output:
        with out.progress("tracing the trade-off") as progress:
            report(subject, progress).save(output)
    if snapshot:
        write_whole(snapshot, memory_trace.snapshot(subject.replayed()))
    if trace:
        write_whole(trace, memory_trace.chrome_trace(subject.replayed()))
