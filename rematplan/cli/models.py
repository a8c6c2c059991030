"""``rematplan models``: list the networks of the zoo."""

from __future__ import annotations

import argparse

from rematplan.cli.output import Output


def add(parser: argparse.ArgumentParser) -> None:
    """Add nothing to ``parser``: ``rematplan models`` has no arguments."""
    del parser


def run(args: argparse.Namespace, out: Output) -> int:
    """Run ``rematplan models``: list the networks of the zoo with their sizes and parameters. Return the exit status
    0."""
    del args
    from rematplan.models import ZOO, build  # imported here, since `rematplan --help` does not need torch
    from rematplan.report.tables import models_table
    from rematplan.runtime.capture.fake_weights import shapes_only

    counted = []
    with shapes_only():
        for name, entry in ZOO.items():
            counted.append((entry, sum(p.numel() for p in build(name).parameters())))
    out.show(models_table(counted))
    out.data(
        {
            "models": [
                {
                    "name": entry.name,
                    "summary": entry.summary,
                    "output": entry.output,
                    "parameters": parameters,
                    **entry.sizes,
                }
                for entry, parameters in counted
            ]
        }
    )
    return 0
