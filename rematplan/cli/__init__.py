"""The command line: ``rematplan COMMAND``. One file a command; `program` parses and dispatches."""

from __future__ import annotations

import sys
from collections.abc import Sequence

INTERRUPTED = 130


def main(argv: Sequence[str] | None = None) -> int:
    """Run a command; the exit status.

    0: done. 1: a verification failed. 2: an argument, a file or a problem is at fault. 3: no plan fits the
    budget. 130: interrupted. Every error is one line on standard error.
    """
    try:
        from rematplan.cli.program import run  # here, so that an interrupt while it loads is one line too

        return run(argv)
    except KeyboardInterrupt:
        print("rematplan: interrupted", file=sys.stderr)
        return INTERRUPTED
