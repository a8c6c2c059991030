"""The command line: ``rematplan COMMAND``. One file a command; `main` is the way in."""

from rematplan.cli.main import main

__all__ = ["main"]
