"""The command line, ``rematplan COMMAND``. There is one module per command; `run_command` parses the arguments and
calls the command."""

from __future__ import annotations

import sys
from collections.abc import Sequence

INTERRUPTED = 130


def main(argv: Sequence[str] | None = None) -> int:
    """Run a command of the command line, and return its exit status.

    0: success. 1: a verification found a difference, ``audit`` found a fault, ``fit`` says that the step does not fit,
    or the reader of standard output has ended. 2: an argument, a file or a problem is at fault. 3: no plan fits the
    budget. 130: interrupted. Errors are printed on standard error, in one line.

    ``argv``: the command and its arguments; None: those of the process.
    """
    try:
        # Imported here, so that Ctrl-C during the import is reported in one line, too.
        from rematplan.cli.run_command import run

        return run(argv)
    except KeyboardInterrupt:
        print("rematplan: interrupted", file=sys.stderr)
        return INTERRUPTED
