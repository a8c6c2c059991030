"""``rematplan pipeline-step``: run a step of a planned pipeline, measure each rank, and compare the results with those
of a single process."""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING

from rematplan.cli.arguments import add_time_limit, time_limit
from rematplan.cli.output import VERIFICATION_FAILED, Output
from rematplan.ir import UsageError
from rematplan.planner.auto.auto_strategy import Auto
from rematplan.planner.pipeline.pipeline_file import StatedPipeline, load_pipeline
from rematplan.runtime.costs.device_models import ROOFLINE

if TYPE_CHECKING:
    from rematplan.pipeline.run_step import RankReport


def add(parser: argparse.ArgumentParser) -> None:
    """Add the arguments of ``rematplan pipeline-step`` to ``parser``."""
    parser.add_argument(
        "file", type=Path, metavar="PIPELINE.json", help="a file that rematplan pipeline wrote"
    )
    parser.add_argument(
        "--verify",
        action="store_true",
        help="compare losses, gradients and buffers bit by bit with a single process that runs the same micro-batches",
    )
    add_time_limit(
        parser, f"about how many seconds a rank may take to plan its stages; default {Auto.time_limit:.0f}"
    )


def run(args: argparse.Namespace, out: Output) -> int:
    """Run ``rematplan pipeline-step`` as one rank; rank 0 shows all measurements. Return 1 if ``--verify`` found a
    difference, else 0; `UsageError` unless torchrun has started a process for each rank."""
    plan, seconds = load_pipeline(args.file), time_limit(args, Auto.time_limit)
    ranks = plan.ranks
    if "RANK" not in os.environ or "WORLD_SIZE" not in os.environ:
        raise UsageError(
            f"start one process for each rank of {args.file}: "
            f"torchrun --nproc-per-node {ranks} -m rematplan pipeline-step {args.file}"
        )
    if (world := os.environ["WORLD_SIZE"]) != str(ranks):
        raise UsageError(
            f"torchrun started {world} {'process' if world == '1' else 'processes'}, but the ranks of {args.file} need "
            f"{ranks}; write torchrun --nproc-per-node {ranks}"
        )
    from rematplan.pipeline.run_step import run_on_all_ranks

    reports = run_on_all_ranks(plan, verify=args.verify, time_limit=seconds)
    wrong = [f"rank {rank}: {name}" for rank, one in enumerate(reports) for name in one.different]
    if int(os.environ["RANK"]) == 0:
        _show(plan, reports, out)
        if args.verify and not wrong:
            out.show(_agreement(reports))
        out.data({"ranks": [asdict(one) for one in reports]})
        if wrong:
            print(f"rematplan: differs from a single process: {', '.join(wrong[:5])}", file=sys.stderr)
    return VERIFICATION_FAILED if wrong else 0


def _show(plan: StatedPipeline, reports: Sequence[RankReport], out: Output) -> None:
    """Print a table of all ranks' peaks."""
    from rematplan.report.pipeline_tables import measured_ranks_table

    out.show(measured_ranks_table(plan, reports))
    if plan.model.get("costs") == ROOFLINE:
        out.show(
            "the roofline model has no workspaces, so peaks may be higher than promised; plan with --costs profile"
        )


def _agreement(reports: Sequence[RankReport]) -> str:
    """Return the sentence that says how exactly all ranks agree with a single process."""
    compared = sum(one.compared for one in reports)
    expected = max(one.expected for one in reports)
    error = max(one.error for one in reports)
    forward = max(one.of_forwards for one in reports)
    if not expected:
        return f"bit-equal to a single process: {compared} gradients, buffers and losses"
    return (
        f"within the predicted error {expected:.1e} of a single process: {compared} gradients (largest error "
        f"{error:.1e}), buffers and losses ({f'largest error {forward:.1e}' if forward else 'bit-equal'})"
    )
