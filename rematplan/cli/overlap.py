"""``--overlap``: a plan on two lanes, if that is wanted and pays."""

from __future__ import annotations

import argparse
from collections.abc import Iterable
from dataclasses import replace

from rematplan.cli.arguments import positive_number
from rematplan.cli.output import Output
from rematplan.cli.source import PROFILE, Source
from rematplan.ir import UsageError
from rematplan.planner.lanes import Sharing, place
from rematplan.planner.overlap import PAYS, USUAL, fastest_on_two_lanes, saved
from rematplan.planner.plan import Plan
from rematplan.planner.schedule import runs_of
from rematplan.planner.strategies.reversible import Reversible

OFF, AUTO, ON = "off", "auto", "on"


def add_overlap(parser: argparse.ArgumentParser, default: str) -> None:
    """Whether recovery runs beside the gradients."""
    parser.add_argument(
        "--overlap",
        choices=(OFF, AUTO, ON),
        help="run what brings tensors back, by computing them again or by inverses, beside the gradients, as far ahead "
        "as the budget allows: on two threads, or two CUDA streams; auto: where that is predicted to save "
        f"{100 * PAYS:.0f} %% of the time; default {default}",
    )
    parser.add_argument(
        "--lane-speed",
        type=positive_number,
        metavar="X",
        help="the speed of each of two lanes while both run, to that of one alone, from 0.5 (nothing is gained) to 1; "
        f"by default measured where ops are, else {USUAL.speed}",
    )


def check_overlap(args: argparse.Namespace) -> None:
    """Refuse a speed that no lane has.

    Raises:
        UsageError: it is not between 0.5 and 1.
    """
    if args.lane_speed is not None and not 0.5 <= args.lane_speed <= 1:
        raise UsageError(f"--lane-speed {args.lane_speed:g} is not between 0.5 and 1")


def overlapped(
    source: Source, plan: Plan, args: argparse.Namespace, out: Output, more: Iterable[Plan] = ()
) -> tuple[Plan, tuple[str, ...]]:
    """The plan as ``--overlap`` wants it, and why it has one lane if it was not to have one.

    ``more``: further plans of the same problem, one of which may end sooner on two lanes.
    """
    if args.overlap in (None, OFF):
        return (replace(plan, lanes=None) if args.overlap else plan), ()
    budget = plan.estimate.peak if plan.budget is None else plan.budget
    sharing = _sharing(source, plan, args, out)
    inverted = Reversible().curve(source.graph, ()) if source.graph.inverses else ()
    found = fastest_on_two_lanes(source.graph, (plan, *more, *inverted), budget, sharing)
    if found is None:
        return plan, ("overlap: nothing comes back in the backward half, so that the plan has one lane",)
    share = saved(found, plan.estimate.cost)
    if args.overlap == AUTO and share < PAYS:
        said = (
            f"two lanes would save {share:.1%} of the step's time"
            if share > 0
            else "two lanes would save no time"
        )
        return plan, (f"overlap: {said}, each at {sharing.speed:.2f} of its speed, so that the plan has one",)
    if found.schedule != plan.schedule:  # the floor is any plan's
        found = replace(found, lower_bound=plan.lower_bound, status="feasible")
    return replace(found, budget=plan.budget, fingerprint=plan.fingerprint), ()


def _sharing(source: Source, plan: Plan, args: argparse.Namespace, out: Output) -> Sharing:
    """How the lanes share the device: stated, measured where the ops were, or usual."""
    if args.lane_speed is not None:
        return replace(USUAL, speed=args.lane_speed)
    graph, runs = source.graph, runs_of(plan.schedule)
    measured = args.device_model is None and args.costs in (None, PROFILE)
    if source.loaded is None or not measured:
        return USUAL
    from rematplan.runtime.lane_speed import measured_sharing

    with out.progress("measuring two lanes"):
        costs = {name: graph.op[name].cost for name in runs}
        return measured_sharing(source.loaded.step, runs, place(graph, runs), costs)
