"""The command line, ``rematplan COMMAND``: one module per command; `run_command` parses arguments and calls the
command.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence

INTERRUPTED = 130


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command that the arguments name, and return its exit status.

    0: success. 1: a verification found a difference. 2: an argument, a file or a problem is at fault. 3: no plan fits
    the budget. 130: interrupted. Every error is one line on standard error.

    ``argv``: the arguments; by default those of the process.
    """
    try:
        from rematplan.cli.run_command import (
            run,
        )  # imported here, so that Ctrl-C during the import is reported in one line, too

        return run(argv)
    except KeyboardInterrupt:
        print("rematplan: interrupted", file=sys.stderr)
        return INTERRUPTED
