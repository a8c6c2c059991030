"""``rematplan pipeline``: divide a model into stages, plan each rank within the budget, show the timeline."""

from __future__ import annotations

import argparse
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rematplan.cli.arguments import add_time_limit, check_outputs, positive, time_limit
from rematplan.cli.output import Output
from rematplan.cli.problem_source import add_costs, add_model, costs_of, load_model, sizes_and_dims
from rematplan.ir import TrainingGraph, UsageError, show_bytes
from rematplan.pipeline.options import OPTIMIZERS, optimizer_copies, parse_link, parse_rank_budget
from rematplan.pipeline.schedules import SCHEDULES, SPLIT
from rematplan.planner.core.inversion_error import stated_limit
from rematplan.planner.pipeline.pipeline_file import PlannedPipeline, pipeline_to_json, save_pipeline
from rematplan.runtime.costs.device_models import PROFILE

if TYPE_CHECKING:
    from rematplan.runtime.graph.captured_step import CapturedStep

AUTO, DATAFLOW = "auto", "dataflow"
USUAL = 60.0
"""Seconds of search, unless stated."""


def add(parser: argparse.ArgumentParser) -> None:
    """Add the arguments of ``rematplan pipeline`` to ``parser``."""
    add_model(parser, problem_file=False)
    add_costs(parser)
    parser.add_argument(
        "--stages",
        type=positive,
        required=True,
        metavar="N",
        help="the number of stages: one on each rank; with interleaved, zbv, interleaved-zb and dualpipev two",
    )
    parser.add_argument(
        "--microbatches",
        type=positive,
        required=True,
        metavar="N",
        help="the number of micro-batches in a step; --dim batch=N is the number of samples in each",
    )
    parser.add_argument(
        "--budget",
        required=True,
        metavar="SIZE",
        help="memory for everything a rank holds: 4GiB, 512MB, or 60%% of the largest peak of a rank that recomputes "
        "nothing in the same schedule",
    )
    parser.add_argument(
        "--schedule",
        default="1f1b",
        metavar="NAME",
        help=f"one of {', '.join(SCHEDULES)}, or auto for the one with the least makespan; default 1f1b",
    )
    parser.add_argument(
        "--cuts",
        default=AUTO,
        metavar="NAMES",
        help="the modules with which the second and each later stage begin, such as blocks.6,blocks.12; default auto: "
        "those with the least makespan",
    )
    parser.add_argument(
        "--optimizer",
        default="none",
        metavar="NAME",
        help=f"the optimizer whose state each rank holds for its parameters: {', '.join(OPTIMIZERS)}; default none",
    )
    parser.add_argument(
        "--link",
        metavar="SPEED,DELAY",
        help="bandwidth and latency between ranks, such as 25GB/s,5us; by default sending takes no time",
    )
    parser.add_argument(
        "--overhead",
        type=float,
        default=0.0,
        metavar="US",
        help="microseconds that each action takes in addition to its work; default 0",
    )
    add_time_limit(parser, f"about how many seconds the search may take; default {USUAL:.0f}")
    parser.add_argument("-o", "--output", type=Path, metavar="PIPELINE.json", help="write the pipeline")
    parser.add_argument("--png", type=Path, metavar="FILE", help="draw the timeline")


def run(args: argparse.Namespace, out: Output) -> int:
    """Run ``rematplan pipeline``: divide the model into stages, plan them, show the pipeline, write the requested
    files, and return 0. `UsageError` for options that are unknown, malformed or exclude each other."""
    check_outputs(args.output, args.png)
    budget = parse_rank_budget(args.budget)
    link, optimizer = parse_link(args.link), optimizer_copies(args.optimizer)
    seconds = time_limit(args, USUAL)
    if args.schedule not in (*SCHEDULES, AUTO):
        raise UsageError(f"unknown schedule {args.schedule!r}; known: {', '.join((*SCHEDULES, AUTO))}")
    if not 0 <= args.overhead < 1e12:
        raise UsageError(f"--overhead {args.overhead} is not a number of microseconds from 0 to 1e12")
    if args.inverses and args.schedule not in (DATAFLOW, AUTO):
        raise UsageError(
            f"--inverses cannot be combined with --schedule {args.schedule}; they are for {DATAFLOW}"
        )
    from rematplan.pipeline.planning import PipelineRequest, plan_stages
    from rematplan.plans.op_costs import priced as with_costs
    from rematplan.runtime.inversion.find_inverses import with_exact_inverses
    from rematplan.runtime.problem.weight_gradients import with_separate_weights

    began = time.perf_counter()
    costs = costs_of(args)
    inverses = bool(args.inverses) or args.schedule == DATAFLOW
    loaded = load_model(args, out, weightless=costs != PROFILE, inverses=inverses)
    priced: dict[str, tuple[CapturedStep, TrainingGraph]] = {}
    exact = with_exact_inverses(loaded.bare)
    others = tuple(name for name in SCHEDULES if name not in (*SPLIT, DATAFLOW))
    for names, step in ((others, exact), (SPLIT, with_separate_weights(exact)), ((DATAFLOW,), loaded.step)):
        if asked_for := [name for name in names if args.schedule in (AUTO, name)]:
            with out.progress("pricing the ops") as progress:
                graph = with_costs(step, costs, progress, stated_limit(args.inverses))
            priced |= dict.fromkeys(asked_for, (step, graph))
    cuts = None if args.cuts == AUTO else tuple(args.cuts.split(","))
    asked = PipelineRequest(
        args.schedule, args.stages, args.microbatches, budget, seconds, cuts, link, args.overhead, optimizer
    )
    with out.progress(f"planning {loaded.step.name}") as progress:
        plan = plan_stages(priced, asked, _model(args, costs), progress)
    _show(plan, (*loaded.notes, *kept_inputs(plan)), out)
    if args.output:
        save_pipeline(plan, args.output)
        out.show(f"pipeline: {args.output}")
    if args.png:
        from rematplan.report.plot_timeline import save_timeline

        save_timeline(args.png, plan)
        out.show(f"timeline: {args.png}")
    out.data(pipeline_to_json(plan) | {"planning_seconds": time.perf_counter() - began})
    return 0


def kept_inputs(plan: PlannedPipeline) -> tuple[str, ...]:
    """Return, for a dataflow pipeline, a note on each stage that keeps bytes from forward to backward, and why; else
    none."""
    if plan.schedule.name != DATAFLOW:
        return ()
    kept = {s.stage: show_bytes(s.held.kept) for s in plan.stages if s.held.kept}
    last = len(plan.stages) - 1
    return tuple(
        f"stage {stage} keeps {size} per micro-batch from forward to backward: "
        f"{'it has only one in flight' if stage == last else 'no inverse recovers its input'}"
        for stage, size in kept.items()
    )


def _show(plan: PlannedPipeline, notes: tuple[str, ...], out: Output) -> None:
    from rematplan.report.pipeline_tables import pipeline_table, ranks_table

    out.show(*notes, ranks_table(plan), pipeline_table(plan))


def _model(args: argparse.Namespace, costs: str) -> dict[str, Any]:
    """Return the arguments with which the model was loaded, as JSON data, so that ``rematplan pipeline-step`` can load
    it again."""
    sizes, dims = sizes_and_dims(args)
    return {
        "model": args.model,
        "sizes": dict(sizes),
        "dims": [list(pair) for pair in dims.items()],
        "loss": args.loss,
        "bn": args.bn,
        "dropout": args.dropout,
        "device": args.device,
        "costs": costs,
    }
