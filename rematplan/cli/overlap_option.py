"""The options ``--overlap`` and ``--lane-speed``: run recomputation and inverses at the same time as the gradients, on
a second CUDA stream or thread."""

from __future__ import annotations

import argparse
from dataclasses import replace

from rematplan.cli.arguments import positive_number
from rematplan.ir import UsageError
from rematplan.planner.core.lane_schedule import Sharing
from rematplan.planner.overlap.place_on_lanes import PAYS, USUAL
from rematplan.plans.two_lane_plans import MODES


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


def lane_sharing(args: argparse.Namespace) -> Sharing:
    """Return how fast each of two lanes is while both run: as ``--lane-speed`` says, otherwise a typical value."""
    return USUAL if args.lane_speed is None else replace(USUAL, speed=args.lane_speed)
