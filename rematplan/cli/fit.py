"""``rematplan fit``: whether a training step fits into a device's memory, before anything runs."""

from __future__ import annotations

import argparse
import re
from collections.abc import Iterator
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING

from rematplan.cli.arguments import DTYPES, dimension, dimensions
from rematplan.cli.output import Output
from rematplan.cli.problem_source import TIMM, check_reachable
from rematplan.fitting.lengths import Lengths, read_lengths
from rematplan.ir import UsageError
from rematplan.plans.budgets import parse_budget
from rematplan.runtime.costs.device_models import ROOFLINE, check_costs

if TYPE_CHECKING:
    from rematplan.fitting.fit import Fit

FITS, DOES_NOT = 0, 1
BATCH, TOKENS = "batch", "tokens"
NONE = "none"


def add(parser: argparse.ArgumentParser) -> None:
    """Add the arguments of ``rematplan fit`` to ``parser``."""
    parser.add_argument(
        "model",
        metavar="MODEL",
        help="a network of the zoo (see: rematplan info models), an ONNX file, a config.json of Hugging Face, "
        "timm/NAME, or package.module:function, a function that returns a module and its inputs",
    )
    parser.add_argument("--memory", required=True, metavar="SIZE", help="the device's memory: 80GB, 79GiB")
    parser.add_argument(
        "--dim",
        type=dimension,
        action="append",
        metavar="NAME=SIZE",
        help="a size in question, such as batch=8 or tokens=4096; may be repeated",
    )
    parser.add_argument(
        "--vary",
        default=BATCH,
        metavar="NAME",
        help="the size whose largest value is searched for: batch (default), tokens, image, depth, or a symbolic "
        "dimension of an ONNX file",
    )
    parser.add_argument(
        "--lengths",
        type=Path,
        metavar="FILE",
        help="the lengths of a data set's samples, one in each line, or a length and a number of samples: a batch with "
        "the longest must fit. They are sizes of tokens, or of what --vary names",
    )
    parser.add_argument(
        "--costs",
        default=ROOFLINE,
        metavar="KIND",
        help="a device model, such as h100 (rematplan info devices lists them; roofline, the default: a default "
        "device), without workspaces; profile: time and workspace of each op, measured on this machine; or FILE.json",
    )
    parser.add_argument(
        "--optimizer",
        default="adamw",
        metavar="NAME",
        help="one of PyTorch's, such as sgd, adam or adamw (default), or none",
    )
    parser.add_argument(
        "--dtype",
        choices=DTYPES,
        help="types of parameters and inputs; bf16-mixed: autocast; by default as the model has them",
    )
    parser.add_argument(
        "--max-overhead", metavar="SHARE", type=share, help="the largest extra time of a plan, such as 20%%"
    )
    parser.add_argument(
        "--loss", metavar="NAME", help="cross_entropy, mse or output; by default the one that fits"
    )


def _about(lengths: Lengths, counted: str, found: Fit) -> Iterator[str]:
    """Yield what a data set's lengths mean for the sizes that fit. ``counted``: the dimension whose sizes they are."""
    yield (
        f"the longest of {lengths.samples} samples has {counted} {lengths.longest}: its batch is padded to that"
    )
    if found.dimension != counted or found.largest is None:
        return
    for how, row in (("without a plan", found.largest.without), ("with a plan", found.largest.planned)):
        size = row.size if row else 0
        if longer := lengths.longer_than(size):
            yield f"{how}, {counted} {size} fits: {longer} of {lengths.samples} samples are longer"


def share(text: str) -> float:
    """Read a share of the step's time, ``20%`` or ``0.2``, or raise `ArgumentTypeError`."""
    found = re.fullmatch(r"([0-9]{1,6}(?:\.[0-9]{1,6})?) ?(%?)", text)
    if not found:
        raise argparse.ArgumentTypeError(f"{text[:40]!r} is not a share, such as 20%")
    return float(found[1]) / (100 if found[2] else 1)


def run(args: argparse.Namespace, out: Output) -> int:
    """Run ``rematplan fit``, and return the exit status: 0 if the step fits, with a plan if necessary, else 1.
    `UsageError` for options that contradict each other, or an unknown model."""
    parse_budget(args.memory, ("bytes",), "memory")
    check_costs(args.costs)
    sizes = dimensions(args.dim or ())
    lengths = None if args.lengths is None else read_lengths(args.lengths)
    counted = TOKENS if args.vary == BATCH else args.vary
    if lengths and sizes.setdefault(counted, lengths.longest) != lengths.longest:
        raise UsageError(
            f"--lengths states the size of {counted}, {lengths.longest}; leave out --dim {counted}"
        )
    if not (":" in args.model or args.model.startswith(TIMM)) or Path(args.model).exists():
        if not args.model.endswith(".json"):
            check_reachable(args.model, None)
        elif not Path(args.model).exists():
            raise UsageError(f"{args.model}: there is no such file")
    from rematplan.cli.fit_models import sized_model
    from rematplan.fitting.fit import answer
    from rematplan.fitting.question import question
    from rematplan.report.fit_tables import largest_line, largest_table, margin_table, split_table, verdict

    optimizer = None if args.optimizer == NONE else args.optimizer
    asked = question(args.memory, optimizer, args.dtype, args.costs, args.max_overhead)
    with out.progress("fitting") as progress:
        model = sized_model(args.model, args.vary, sizes, asked, args.loss)
        found = answer(model, asked, True, progress)
    out.show(
        verdict(found, asked.max_overhead),
        *found.notes,
        *(_about(lengths, counted, found) if lengths else ()),
        split_table(found),
    )
    if found.margin:
        out.show(margin_table(found))
    out.show(largest_table(found), largest_line(found))
    out.data(
        {
            "verdict": verdict(found, asked.max_overhead),
            "fits": found.fits,
            "spare": found.spare,
            **asdict(found),
        }
    )
    return FITS if found.fits else DOES_NOT
