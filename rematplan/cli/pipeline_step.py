"""``rematplan pipeline-step``: run a planned pipeline, measure each rank, compare it with one process."""

from __future__ import annotations

import argparse
import os
import sys
from pathlib import Path

from rematplan.cli.arguments import positive_number
from rematplan.cli.output import Output
from rematplan.cli.source import ROOFLINE
from rematplan.ir import UsageError
from rematplan.planner.pipeline.planned_pipeline import load_pipeline

VERIFICATION_FAILED = 1


def add(parser: argparse.ArgumentParser) -> None:
    """The pipeline's file, verification."""
    parser.add_argument("file", type=Path, metavar="PIPELINE.json", help="what rematplan pipeline wrote")
    parser.add_argument(
        "--verify",
        action="store_true",
        help="compare losses, gradients and buffers with one process that has the same micro-batches, bit by bit",
    )
    parser.add_argument(
        "--time-limit",
        type=positive_number,
        default=30.0,
        metavar="S",
        help="seconds in which each rank plans its own stages, about; default 30",
    )


def run(args: argparse.Namespace, out: Output) -> int:
    """Run one step on all ranks; the first one shows what all measured."""
    plan = load_pipeline(args.file)
    ranks = plan.schedule.ranks
    if "RANK" not in os.environ or "WORLD_SIZE" not in os.environ:
        raise UsageError(
            f"run it in {ranks} processes: torchrun --nproc-per-node {ranks} -m rematplan pipeline-step {args.file}"
        )
    if int(os.environ["WORLD_SIZE"]) != ranks:
        raise UsageError(
            f"{args.file} is for {ranks} ranks, and there are {os.environ['WORLD_SIZE']} processes"
        )
    from rematplan.pipeline.run_step import run_on_all_ranks
    from rematplan.report.pipeline_tables import measured_ranks_table

    reports = run_on_all_ranks(plan, verify=args.verify, time_limit=args.time_limit)
    wrong = [f"rank {rank}: {name}" for rank, one in enumerate(reports) for name in one.different]
    if int(os.environ["RANK"]) == 0:
        out.show(measured_ranks_table(plan, reports))
        if plan.model.get("costs") == ROOFLINE:
            out.show(
                "roofline knows no workspaces, so that peaks may be higher than promised; plan with --costs profile"
            )
        if args.verify and not wrong:
            compared = sum(one.compared for one in reports)
            out.show(f"bit-equal to one process: {compared} gradients, buffers and losses")
        out.data(
            {
                "ranks": [
                    {
                        "promised": one.promised,
                        "measured": one.measured,
                        "extra": one.extra,
                        "losses": list(one.losses),
                        "compared": one.compared,
                        "different": list(one.different),
                    }
                    for one in reports
                ]
            }
        )
        if wrong:
            print(f"rematplan: different from one process: {', '.join(wrong[:5])}", file=sys.stderr)
    return VERIFICATION_FAILED if wrong else 0
