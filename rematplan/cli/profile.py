"""``rematplan profile``: measure a step's ops on this machine, and write their costs for planning elsewhere."""

from __future__ import annotations

import argparse
from dataclasses import replace
from pathlib import Path

from rematplan.cli.arguments import check_outputs
from rematplan.cli.output import Output
from rematplan.cli.problem_source import add_model, load_model


def add(parser: argparse.ArgumentParser) -> None:
    """Add the arguments of ``rematplan profile`` to ``parser``."""
    add_model(parser, problem_file=False)
    parser.add_argument(
        "-o", "--output", type=Path, required=True, metavar="PROFILE.json", help="the file to write"
    )


def run(args: argparse.Namespace, out: Output) -> int:
    """Run ``rematplan profile``: measure a step's distinct ops, and write the costs for ``--costs FILE.json``.
    Return the exit status 0."""
    check_outputs(args.output)
    step = load_model(args, out).step
    from rematplan.runtime.costs.profile import profile_costs
    from rematplan.runtime.costs.profile_json import profile_of, save_profile
    from rematplan.runtime.problem.weight_gradients import with_separate_weights

    separate = with_separate_weights(step)  # as some schedules of pipelines run it
    with out.progress("measuring ops") as progress:
        profile = profile_of(step, profile_costs(step, progress))
        others = profile_of(separate, profile_costs(separate, progress))
    profile = replace(profile, calls={**profile.calls, **others.calls})
    save_profile(profile, args.output)
    out.show(f"{args.output}: {len(profile.calls)} distinct ops of {step.name}, measured on {profile.device}")
    out.data({"model": step.name, "file": args.output, "ops": len(profile.calls), "device": profile.device})
    return 0
