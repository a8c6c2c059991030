"""The options ``--overlap`` and ``--lane-speed``: run recomputation and inverses at the same time as the gradients, on
a second CUDA stream or thread."""

from __future__ import annotations

import argparse
from dataclasses import replace

from rematplan.cli.arguments import positive_number
from rematplan.cli.output import Output
from rematplan.cli.problem_source import PROFILE, Source
from rematplan.ir import UsageError
from rematplan.planner.core.lane_schedule import Sharing
from rematplan.planner.core.plan import Plan
from rematplan.planner.overlap.place_on_lanes import PAYS, USUAL
from rematplan.plans.two_lane_plans import MODES, overlapped, sharing_here


def add_overlap(parser: argparse.ArgumentParser, default: str) -> None:
    """Add the options ``--overlap`` and ``--lane-speed`` to ``parser``.

    ``default``: the default of ``--overlap`` that the help text states.
    """
    parser.add_argument(
        "--overlap",
        choices=MODES,
        help="run recomputation and inverses at the same time as the gradients, on a second thread or CUDA stream, as "
        f"far ahead as the budget allows; auto: if that is predicted to save {100 * PAYS:.0f} %% of the time; "
        f"default {default}",
    )
    parser.add_argument(
        "--lane-speed",
        type=positive_number,
        metavar="X",
        help="the speed of each lane while both run, relative to one that runs alone, from 0.5 (no gain) to 1; "
        f"by default it is measured if ops are measured, otherwise {USUAL.speed}",
    )


def check_overlap(args: argparse.Namespace) -> None:
    """Check the value of ``--lane-speed``: the speed of each of two lanes (CUDA streams or threads) while both run,
    relative to one that runs alone.

    Raises:
        UsageError: the speed is not between 0.5 and 1.
    """
    if args.lane_speed is not None and not 0.5 <= args.lane_speed <= 1:
        raise UsageError(f"--lane-speed {args.lane_speed:g} is not between 0.5 and 1")


def lane_sharing(source: Source, plan: Plan, args: argparse.Namespace, out: Output) -> Sharing:
    """Return how fast each of two lanes (CUDA streams or threads) is while both run.

    The speed is the value of ``--lane-speed``, if that is stated. Otherwise it is measured on ops of the plan, if the
    costs of ops are measured on this machine, too. Otherwise it is a typical value.
    """
    if args.lane_speed is not None:
        return replace(USUAL, speed=args.lane_speed)
    if source.loaded is None or args.device_model is not None or args.costs not in (None, PROFILE):
        return USUAL
    with out.progress("measuring two lanes"):
        return sharing_here(source.loaded.step, source.graph, plan)


def wanted_lanes(
    source: Source, plan: Plan, args: argparse.Namespace, out: Output
) -> tuple[Plan, tuple[str, ...]]:
    """Return the plan, divided into two lanes (CUDA streams or threads) if ``--overlap`` asks for it and it is possible
    within the budget. Return also notes for the user.

    If two lanes were asked for and the plan has one, a note says why.
    """
    return overlapped(source.graph, plan, args.overlap, lambda: lane_sharing(source, plan, args, out))
