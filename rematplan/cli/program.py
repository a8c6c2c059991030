"""From arguments to a command, errors to one line and an exit status."""

from __future__ import annotations

import argparse
import io
import os
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from importlib import metadata

from rematplan.cli import compare, curve, demo, export, models, plan, profile, step
from rematplan.cli.arguments import Parser
from rematplan.cli.output import Output
from rematplan.ir import RematplanError

CANNOT = 2


@dataclass(frozen=True, slots=True)
class Command:
    """A command: its options, and what it does (returns the exit status)."""

    name: str
    summary: str
    add: Callable[[argparse.ArgumentParser], None]
    run: Callable[[argparse.Namespace, Output], int]


COMMANDS = (
    Command("models", "list the networks that have a name", models.add, models.run),
    Command("export", "write a network as an ONNX file in training form", export.add, export.run),
    Command("plan", "plan a training step within a memory budget", plan.add, plan.run),
    Command("curve", "show the memory/overhead trade-off", curve.add, curve.run),
    Command("compare", "keep, recompute or invert: peak, time and gradient error", compare.add, compare.run),
    Command("profile", "measure a training step's ops, for plans made elsewhere", profile.add, profile.run),
    Command("step", "run a planned training step and measure it", step.add, step.run),
    Command("demo", "plan and run U-Net and ResNet-50, from ONNX files", demo.add, demo.run),
)


def run(argv: Sequence[str] | None = None) -> int:
    """Run a command; the exit status, as `rematplan.cli.main` lists them."""
    if isinstance(sys.stdout, io.TextIOWrapper):  # a name in a file may hold what this terminal cannot show
        sys.stdout.reconfigure(errors="backslashreplace")
    try:
        args = parser().parse_args(argv)
        status: int = args.run(args, Output(json=args.json, quiet=args.quiet))
        sys.stdout.flush()
        return status
    except SystemExit as exit_:  # --help, --version
        return exit_.code if isinstance(exit_.code, int) else 0
    except BrokenPipeError:  # the reader of a pipe has left; nothing more can be said to it
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 1
    except RematplanError as error:
        return _fail(str(error), error.exit_status)
    except OSError as error:
        return _fail(f"{error.filename}: {error.strerror}" if error.filename else str(error), CANNOT)
    except (MemoryError, RuntimeError) as error:
        if not _out_of_memory(error):
            raise
        return _fail(
            "this machine has not enough memory for that; try a smaller batch, image or width", CANNOT
        )


def parser() -> Parser:
    """The parser of all commands."""
    root = Parser(
        prog="rematplan", description="A training step within a memory budget, at the least extra time."
    )
    root.add_argument("--version", action="version", version=f"rematplan {metadata.version('rematplan')}")
    commands = root.add_subparsers(metavar="COMMAND", required=True)
    for command in COMMANDS:
        child = commands.add_parser(command.name, help=command.summary, description=command.summary)
        command.add(child)
        child.add_argument("--json", action="store_true", help="one JSON document on standard output")
        child.add_argument("--quiet", action="store_true", help="no tables and no progress")
        child.set_defaults(run=command.run)
    return root


def _fail(message: str, status: int) -> int:
    print(f"rematplan: {' '.join(message.split())}", file=sys.stderr)
    return status


def _out_of_memory(error: BaseException) -> bool:
    # PyTorch's CPU allocator has no error type of its own.
    return isinstance(error, MemoryError) or "allocate memory" in str(error) or "out of memory" in str(error)
