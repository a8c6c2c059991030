"""Parse the arguments of the command line, run the command, and turn errors into one line and an exit status."""

from __future__ import annotations

import argparse
import io
import os
import sys
import warnings
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from importlib import import_module, metadata
from typing import Any, NoReturn

from rematplan.cli.arguments import DEFAULT
from rematplan.cli.output import Output
from rematplan.cli.remembered_interrupt import remembered, stop_if_pressed
from rematplan.ir import RematplanError, UsageError

CANNOT = 2
"""The exit status if an argument, a file or a problem is at fault."""


COMMANDS = {
    "info": "list the zoo's networks, device models and saved files; compile the planner's loops",
    "export": "write a network as an ONNX file in training form",
    "plan": "plan a training step within a memory budget",
    "audit": "tell whether a model's own checkpointing is right, and what it costs",
    "fit": "tell whether a training step fits into a device's memory, before anything runs",
    "report": "write an HTML page about a plan: memory over the step, what is recomputed, what bounds the peak",
    "curve": "show the memory/overhead trade-off",
    "compare": "compare keeping, recomputing and inverting: peak, time and gradient error",
    "profile": "measure a training step's ops, for planning on another machine",
    "pipeline": "plan a model over several ranks, each within a memory budget",
    "pipeline-step": "run a planned pipeline's step under torchrun, one process per rank",
    "step": "run a planned training step and measure it",
    "demo": "plan and run U-Net and ResNet-50, from ONNX files",
}
"""Each command with its summary.

The module `rematplan.cli.NAME` (with _ for -) has the functions ``add`` (adds its arguments) and ``run`` (returns the
exit status).
"""


class Parser(argparse.ArgumentParser):
    """An argument parser that raises `UsageError` for wrong arguments, and accepts no abbreviated options."""

    def __init__(self, **more: Any) -> None:
        super().__init__(allow_abbrev=False, **more)

    def parse_known_args(self, args: Any = None, namespace: Any = None) -> Any:
        """Parse arguments, where ``--inverses`` may have a value: ``--inverses=1e-5``. argparse alone would take the
        next argument for its value."""
        words = sys.argv[1:] if args is None else args
        stated = [f"{word}={DEFAULT}" if word == "--inverses" else word for word in words]
        return super().parse_known_args(stated, namespace)

    def error(self, message: str) -> NoReturn:
        """Raise a `UsageError` with ``message`` instead of printing the usage and exiting."""
        raise UsageError(f"{message} (see {self.prog} --help)")


def run(argv: Sequence[str] | None = None) -> int:
    """Run a command and return its exit status. Expected errors are printed as one line; after Ctrl-C,
    KeyboardInterrupt is raised."""
    # Names in files may contain characters that the terminal cannot show.
    if isinstance(sys.stdout, io.TextIOWrapper):
        sys.stdout.reconfigure(errors="backslashreplace")
    with remembered():
        try:
            status = _status(argv)
        except Exception:  # of any kind: it is raised again, unless Ctrl-C was its cause
            stop_if_pressed()
            raise
        stop_if_pressed()
        return status


def _status(argv: Sequence[str] | None) -> int:
    """Run the command that ``argv`` states, and return its exit status. Errors of rematplan, of files and of lacking
    memory are printed in one line; others are raised."""
    try:
        args = parser(sys.argv[1:] if argv is None else argv).parse_args(argv)
        with _warnings_in_one_line():
            status: int = args.run(args, Output(json=args.json, quiet=args.quiet))
        sys.stdout.flush()
        return status
    except SystemExit as exit_:  # --help, --version
        return exit_.code if isinstance(exit_.code, int) else 0
    except BrokenPipeError:  # the reader of the pipe has ended: nothing more can be written
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 1
    except RematplanError as error:
        return _fail(str(error), error.exit_status)
    except OSError as error:
        return _fail(f"{error.filename}: {error.strerror}" if error.filename else str(error), CANNOT)
    except (MemoryError, RuntimeError) as error:
        if not _out_of_memory(error):
            raise
        return _fail("this machine does not have enough memory; try a smaller batch, image or width", CANNOT)


@contextmanager
def _warnings_in_one_line() -> Iterator[None]:
    """In this context, a warning is printed as one line, without the place in the code that raised it."""
    before = warnings.formatwarning
    warnings.formatwarning = lambda message, *_, **__: f"rematplan: {message}\n"
    try:
        yield
    finally:
        warnings.formatwarning = before


def parser(argv: Sequence[str]) -> Parser:
    """Return the parser, with the arguments of ``argv``'s command only: importing the others takes seconds."""
    root = Parser(
        prog="rematplan",
        description="Run a training step within a memory budget, with the least extra time for recomputation.",
    )
    root.add_argument("--version", action="version", version=f"rematplan {metadata.version('rematplan')}")
    commands = root.add_subparsers(metavar="COMMAND", required=True)
    wanted = next((word for word in argv if word in COMMANDS), None)
    for name, summary in COMMANDS.items():
        child = commands.add_parser(name, help=summary, description=summary)
        if name == wanted:
            command = import_module(f"rematplan.cli.{name.replace('-', '_')}")
            command.add(child)
            child.add_argument(
                "--json", action="store_true", help="print one JSON document on standard output, no tables"
            )
            child.add_argument("--quiet", action="store_true", help="print no tables and no progress bar")
            child.set_defaults(run=command.run)
    return root


def _fail(message: str, status: int) -> int:
    stop_if_pressed()
    print(f"rematplan: {' '.join(message.split())}", file=sys.stderr)
    return status


def _out_of_memory(error: BaseException) -> bool:
    # PyTorch raises plain RuntimeErrors: of its CPU allocator, or because a number of bytes has more than 64 bits.
    words = ("allocate memory", "out of memory", "calculation overflowed")
    return isinstance(error, MemoryError) or any(word in str(error) for word in words)
