"""Load the problem to plan, which the arguments of a command name: a network of the zoo, an ONNX file, or a problem
file."""

from __future__ import annotations

import argparse
import ctypes
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from rematplan.cli.arguments import dimension, dimension_or_range, dimensions, inversion_error
from rematplan.cli.output import Output
from rematplan.ir import TrainingGraph, UsageError, load_problem
from rematplan.models.names import SIZES, SUMMARIES, ZooError
from rematplan.planner.arrays.phases import contradiction
from rematplan.planner.core.inversion_error import stated_limit, with_anchors
from rematplan.planner.strategies.reversible import Reversible
from rematplan.runtime.costs.device_models import PROFILE, check_costs

if TYPE_CHECKING:
    from rematplan.api import LoadedStep

DRIVERS = ("libcuda.so.1", "nvcuda.dll")
"""The names of NVIDIA's driver library on Linux and on Windows."""
AMD_DEVICE = Path("/dev/kfd")
"""A file that exists if AMD's driver is installed; torch calls AMD's devices ``cuda``, too."""
PROBLEM = ".json"
"""How the name of a problem file ends."""
TIMM = "timm/"
"""What names of models of timm begin with."""
MODEL_ONLY = ("dim", "loss", "bn", "dropout", "costs", "device")
"""The options that cannot be combined with a problem file."""


@dataclass(frozen=True)
class Source:
    """A problem to plan, with its origin."""

    graph: TrainingGraph
    """The problem."""
    loaded: LoadedStep | None
    """The captured training step from which it was made; None if it was read from a problem file."""
    notes: tuple[str, ...] = ()
    """Sentences for the user."""


def add_model(parser: argparse.ArgumentParser, *, problem_file: bool, ranges: bool = False) -> None:
    """Add the argument MODEL and its options. ``problem_file``: whether MODEL may be a problem file. ``ranges``:
    whether ``--dim`` accepts ranges."""
    parser.add_argument(
        "model",
        metavar="MODEL",
        help="an ONNX file, or a network of the zoo (see: rematplan info models)"
        + (f", or a problem file (NAME{PROBLEM})" if problem_file else ""),
    )
    parser.set_defaults(problem_file=problem_file)
    parser.add_argument(
        "--dim",
        type=dimension_or_range if ranges else dimension,
        action="append",
        metavar="NAME=SIZE",
        help="a size of a network of the zoo, or of a symbolic dimension of an ONNX file, such as batch=8; may be "
        "repeated"
        + (
            "; one may have a range of sizes, such as batch=1..64, or every 8th one, length=8..64..8"
            if ranges
            else ""
        ),
    )
    parser.add_argument(
        "--device",
        metavar="NAME",
        help="where the step is captured, measured and run: cpu (default), cuda or cuda:1",
    )
    parser.add_argument(
        "--loss",
        metavar="NAME",
        help="cross_entropy, mse or output (the output is the loss); by default the one that fits the output",
    )
    parser.add_argument(
        "--bn",
        metavar="FORM",
        help="batch norms of an ONNX file: as-is (default), train (normalise by the batch, update the running "
        "statistics) or frozen (use them as they are)",
    )
    parser.add_argument(
        "--dropout", metavar="FORM", help="dropouts of an ONNX file: as-is (default), on or off"
    )


def add_costs(parser: argparse.ArgumentParser) -> None:
    """Add the options ``--inverses`` and ``--costs`` to ``parser``."""
    parser.add_argument(
        "--inverses",
        type=inversion_error,
        default=False,
        metavar="[=X]",
        help="also recover tensors by inverting what was computed from them: additive couplings, norms, leaky "
        "activations; gradients then equal plain autograd's within rounding errors, not bit by bit. --inverses=1e-5: "
        "the largest predicted relative error of such a tensor; others are kept or recomputed. By default a third of "
        "the type's digits is given up: 1.5e-5 for float32",
    )
    parser.add_argument(
        "--costs",
        metavar="KIND",
        help="profile: time and workspace of each op, measured on this machine and saved (default); a device model, "
        "such as a100, without workspaces (rematplan info devices lists them; roofline: a default device); FILE.json: "
        "a device model, or costs measured elsewhere by `rematplan profile`",
    )


def load(args: argparse.Namespace, out: Output, *, runs: bool = False) -> Source:
    """Load the problem that MODEL names, without weights and data if costs are not measured and the caller does not run
    the step (``runs``). `UsageError` for a problem file with options of a model."""
    if not is_problem(args):
        return _load_model(args, out, runs)
    for option in MODEL_ONLY:
        if getattr(args, option) is not None:
            raise UsageError(f"--{option} needs a network or an ONNX file; {args.model} is a problem file")
    graph = with_anchors(load_problem(Path(args.model)), stated_limit(args.inverses))
    said = contradiction(graph)
    return Source(graph, None, (said,) if said else ())


def is_problem(args: argparse.Namespace) -> bool:
    """Return whether MODEL is a problem file, and the command accepts one."""
    return bool(args.problem_file and args.model.endswith(PROBLEM))


def _load_model(args: argparse.Namespace, out: Output, runs: bool) -> Source:
    """Load a model and price its step, without weights if nothing runs or is measured. `UsageError` if the strategy is
    ``reversible`` and nothing can be inverted."""
    costs = costs_of(args)
    strategy = getattr(args, "strategy", None) or ()
    reversible = Reversible.name in ([strategy] if isinstance(strategy, str) else strategy)
    loaded = load_model(
        args, out, weightless=costs != PROFILE and not runs, inverses=args.inverses or reversible
    )
    source = price(loaded, out, costs, args.inverses)
    if reversible and not source.graph.inverses:
        why = next(iter(loaded.notes[-1:]), "no tensor can be computed from later ones")
        raise UsageError(f"{Reversible.name}: nothing in {loaded.step.name} can be inverted: {why}")
    return source


def costs_of(args: argparse.Namespace) -> str:
    """Return where the costs of ops come from: the value of ``--costs``, or ``profile`` if that is not stated."""
    return getattr(args, "costs", None) or PROFILE


def load_model(
    args: argparse.Namespace, out: Output, *, weightless: bool = False, inverses: bool = False
) -> LoadedStep:
    """Load the model that the argument MODEL names, and capture its training step. Before that, since capturing takes
    long, `UsageError` for an unknown model, device or kind of costs. ``weightless``: without data. ``inverses``: with
    all inverses, instead of exact ones only."""
    check_reachable(args.model, args.device)
    check_costs(costs_of(args))  # before torch is loaded, which takes seconds
    from rematplan import api  # imported here, since problem files are planned without torch
    from rematplan.plans.op_costs import known_costs

    known_costs(costs_of(args))
    sizes, dims = sizes_and_dims(args)
    with out.progress("capturing the training step"), zoo_errors():
        return api.load_step(
            args.model,
            sizes=api.Sizes(**sizes),
            dims=dims,
            loss=args.loss,
            bn=args.bn or "as-is",
            dropout=args.dropout or "as-is",
            weightless=weightless,
            inverses=inverses,
            device=args.device or "cpu",
        )


def sizes_and_dims(args: argparse.Namespace) -> tuple[Mapping[str, int], Mapping[str, int]]:
    """Return what ``--dim`` states: the sizes of a network of the zoo, and those of a file's symbolic dimensions. One
    of the two is empty."""
    stated = dimensions(args.dim or ())
    return (zoo_sizes(args.model, stated), {}) if args.model in SUMMARIES else ({}, stated)


def zoo_sizes(name: str, stated: Mapping[str, int]) -> Mapping[str, int]:
    """Return the sizes that ``--dim`` states for a network of the zoo; `UsageError` for an unknown one."""
    if unknown := [one for one in stated if one not in SIZES]:
        raise UsageError(f"--dim {unknown[0]}: {name} has no such size; known: {', '.join(SIZES)}")
    return stated


def check_reachable(model: str, device: str | None) -> None:
    """Check, before torch is loaded, that the model's name or file and the device exist, else raise `UsageError`."""
    if (Path(model).suffix or Path(model).name != model) and not Path(model).exists():
        raise UsageError(f"{model}: there is no such file")
    if model not in SUMMARIES and not Path(model).exists():
        raise UsageError(
            f"{model!r} is neither an ONNX file nor a network of the zoo ({', '.join(SUMMARIES)})"
        )
    kind = (device or "cpu").partition(":")[0]
    if kind not in ("cpu", "cuda") or (kind == "cuda" and not _has_driver()):
        raise UsageError(f"there is no device {device!r} here; write cpu, cuda or cuda:1")


def _has_driver() -> bool:
    """Return whether this machine has a driver for devices that torch calls ``cuda`` (NVIDIA's or AMD's)."""
    for library in DRIVERS:
        with suppress(OSError):
            ctypes.CDLL(library)
            return True
    return AMD_DEVICE.exists()


def price(loaded: LoadedStep, out: Output, costs: str, inverses: bool | float = True) -> Source:
    """Return the planning problem of a captured step, with measured or modelled costs of its ops."""
    from rematplan import api

    with out.progress("measuring ops" if costs == PROFILE else "computing the ops' costs") as progress:
        graph = api.problem(loaded, costs, progress, inverses)
    return Source(graph, loaded, loaded.notes)


@contextmanager
def zoo_errors() -> Iterator[None]:
    """A context that replaces a `ZooError` by a `UsageError` with the same text: the zoo does not depend on
    rematplan."""
    try:
        yield
    except ZooError as error:
        raise UsageError(str(error)) from None
