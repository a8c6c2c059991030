"""``rematplan cache``: list or delete the files that earlier commands saved, with plans and measured costs."""

from __future__ import annotations

import argparse
from pathlib import Path

from rematplan.cli.output import Output
from rematplan.ir import show_bytes
from rematplan.ir.cache_folder import cache_folder

KEPT = {"plans": "plans/*.json", "costs": "profile-*.json"}
"""For each kind of saved file, the pattern of its path in the cache folder."""


def add(parser: argparse.ArgumentParser) -> None:
    """Add the argument of ``rematplan cache`` to ``parser``: ``list`` or ``clear``."""
    parser.add_argument(
        "action",
        choices=("list", "clear"),
        help="list: show the number and size of the saved files; clear: delete them",
    )


def run(args: argparse.Namespace, out: Output) -> int:
    """Run ``rematplan cache``: list or delete the saved plans and measured costs. Return the exit status 0."""
    from rematplan.report.tables import pairs_table

    folder, deleting = cache_folder(), args.action == "clear"
    found = {what: _files(folder, pattern, deleting) for what, pattern in KEPT.items()}
    rows = {"folder": str(folder)}
    rows |= {what: f"{number} files, {show_bytes(size)}" for what, (number, size) in found.items()}
    out.show(pairs_table("Deleted files" if deleting else "Saved files", rows))
    out.data(
        {
            "folder": str(folder),
            "deleted": deleting,
            **{what: {"files": number, "bytes": size} for what, (number, size) in found.items()},
        }
    )
    return 0


def _files(folder: Path, pattern: str, deleting: bool) -> tuple[int, int]:
    """Return the number and total bytes of the files in a folder that match a pattern. Delete them if ``deleting``."""
    files = sorted(folder.glob(pattern))
    size = sum(file.stat().st_size for file in files)
    for file in files if deleting else ():
        file.unlink(missing_ok=True)
    return len(files), size
