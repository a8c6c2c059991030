"""``rematplan warm``: compile the planner's loops before the first plan, for example in a container image."""

from __future__ import annotations

import argparse
import time

from rematplan.cli.output import Output
from rematplan.ir.cache_folder import cache_folder


def add(parser: argparse.ArgumentParser) -> None:
    """Add nothing to ``parser``: ``rematplan warm`` has no arguments."""
    del parser


def run(args: argparse.Namespace, out: Output) -> int:
    """Run ``rematplan warm``: compile the planner's numba loops that are not compiled yet. Return the exit status 0.

    The machine code is saved on disk for later processes.
    """
    del args
    from rematplan.planner.auto.compile_kernels import compile_kernels
    from rematplan.report.tables import pairs_table

    began = time.monotonic()
    with out.progress("compiling") as progress:
        compile_kernels(progress)
    seconds, folder = time.monotonic() - began, cache_folder() / "kernels"
    out.show(
        pairs_table("The planner's loops are compiled", {"folder": str(folder), "time": f"{seconds:.1f} s"})
    )
    out.data({"folder": str(folder), "seconds": seconds})
    return 0
