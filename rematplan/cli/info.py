"""``rematplan info``: list the networks of the zoo, the device models and the saved files, and compile the planner's
loops."""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, TypeAlias

from rematplan.cli.output import Output
from rematplan.ir import UsageError, show_bytes
from rematplan.ir.cache_folder import cache_folder

Data: TypeAlias = dict[str, Any]

KEPT = {"plans": "plans/*.json", "costs": "profile-*.json"}
"""For each kind of saved file, the pattern of its path in the cache folder."""


def add(parser: argparse.ArgumentParser) -> None:
    """Add the arguments of ``rematplan info`` to ``parser``."""
    parser.add_argument(
        "topic",
        choices=tuple(TOPICS),
        help="models: the networks of the zoo, which MODEL may name; devices: the device models that --costs names; "
        "cache: the saved plans and measured costs; warm: compile the planner's loops, which the first plan on a "
        "machine does otherwise",
    )
    parser.add_argument("--clear", action="store_true", help="with cache: delete the saved files")


def run(args: argparse.Namespace, out: Output) -> int:
    """Run ``rematplan info``: show a topic, and return 0; `UsageError` for ``--clear`` of another than the cache."""
    if args.clear and args.topic != "cache":
        raise UsageError("--clear deletes saved plans and measured costs; write rematplan info cache --clear")
    out.data(TOPICS[args.topic](args, out))
    return 0


def _models(args: argparse.Namespace, out: Output) -> Data:
    """Show the networks of the zoo with their sizes and parameters, and return the same as JSON data."""
    del args
    from rematplan.models import ZOO, build  # imported here, since `rematplan --help` does not need torch
    from rematplan.report.tables import models_table
    from rematplan.runtime.capture.fake_weights import shapes_only

    with shapes_only():
        counted = [(entry, sum(p.numel() for p in build(name).parameters())) for name, entry in ZOO.items()]
    out.show(models_table(counted))
    return {
        "models": [
            {"name": e.name, "summary": e.summary, "output": e.output, "parameters": parameters, **e.sizes}
            for e, parameters in counted
        ]
    }


def _devices(args: argparse.Namespace, out: Output) -> Data:
    """Show the device models with which the roofline model computes the costs of ops, and return the same as JSON
    data."""
    del args
    from rematplan.report.tables import devices_table
    from rematplan.runtime.costs.device_models import DEFAULT_DEVICE_MODEL, DEVICE_MODELS

    rows = [
        {
            "name": model.name,
            "summary": model.summary,
            "default": model.name == DEFAULT_DEVICE_MODEL,
            "teraflops_float32": model.flops["float32"],
            "teraflops_float16": model.flops["float16"],
            "gigabytes_a_second": model.bandwidth,
            "launch_microseconds": model.launch,
        }
        for model in DEVICE_MODELS.values()
    ]
    out.show(devices_table(rows))
    return {"devices": rows}


def _cache(args: argparse.Namespace, out: Output) -> Data:
    """Show the number and size of the saved plans and measured costs, and return the same as JSON data. Delete these
    files if ``--clear`` is given."""
    from rematplan.report.tables import pairs_table

    folder = cache_folder()
    found = {what: _files(folder, pattern, args.clear) for what, pattern in KEPT.items()}
    rows = {what: f"{number} files, {show_bytes(size)}" for what, (number, size) in found.items()}
    out.show(pairs_table("Deleted files" if args.clear else "Saved files", {"folder": str(folder), **rows}))
    sizes = {what: {"files": number, "bytes": size} for what, (number, size) in found.items()}
    return {"folder": str(folder), "deleted": args.clear, **sizes}


def _files(folder: Path, pattern: str, deleting: bool) -> tuple[int, int]:
    """Return the number and total bytes of the files in a folder that match a pattern. Delete them if ``deleting``."""
    files = sorted(folder.glob(pattern))
    size = sum(file.stat().st_size for file in files)
    for file in files if deleting else ():
        file.unlink(missing_ok=True)
    return len(files), size


def _warm(args: argparse.Namespace, out: Output) -> Data:
    """Compile the planner's numba loops that are not compiled yet, and return the folder and the seconds as JSON data.
    The machine code is saved for later processes."""
    del args
    from rematplan.planner.auto.compile_kernels import compile_kernels
    from rematplan.report.tables import pairs_table

    began = time.monotonic()
    with out.progress("compiling") as progress:
        compile_kernels(progress)
    seconds, folder = time.monotonic() - began, cache_folder() / "kernels"
    rows = {"folder": str(folder), "time": f"{seconds:.1f} s"}
    out.show(pairs_table("The planner's loops are compiled", rows))
    return {"folder": str(folder), "seconds": seconds}


TOPICS: dict[str, Callable[[argparse.Namespace, Output], Data]] = {
    "models": _models,
    "devices": _devices,
    "cache": _cache,
    "warm": _warm,
}
