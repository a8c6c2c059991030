"""``rematplan warm``: compile the planner's loops before the first plan, for example in a container image."""

from __future__ import annotations

import argparse
import time

from rematplan.cli.output import Output
from rematplan.ir.cache_folder import cache_folder


def add(parser: argparse.ArgumentParser) -> None:
    """Do nothing: this command has no arguments."""
    del parser


def run(args: argparse.Namespace, out: Output) -> int:
    """Compile all loops that are not compiled yet, and save the machine code for later processes; return the exit
    status.
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
