"""The command line, ``rematplan COMMAND``. There is one module per command; `run_command` parses the arguments and
calls the command."""

from __future__ import annotations

import sys
from collections.abc import Sequence

INTERRUPTED = 130


def main(argv: Sequence[str] | None = None) -> int:
    """Run a command and return its exit status: 0 success, 1 a check failed, 2 bad input, 3 unreachable budget, 130
    interrupted. Status 1 also follows if standard output is closed, or `fit` finds that a step does not fit. ``argv``
    None: the process's."""
    try:
        # Imported here, so that Ctrl-C during the import is reported in one line, too.
        from rematplan.cli.run_command import run

        return run(argv)
    except KeyboardInterrupt:
        print("rematplan: interrupted", file=sys.stderr)
        return INTERRUPTED
