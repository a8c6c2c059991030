"""``rematplan kfac``: model the time and memory of data-parallel training by SGD and by K-FAC on many devices."""

from __future__ import annotations

import argparse
import re
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rematplan.cli.arguments import check_outputs, positive
from rematplan.cli.output import Output
from rematplan.cli.problem_source import add_model, load_model
from rematplan.planner.strategies.store_all import no_recompute

if TYPE_CHECKING:
    from rematplan.optim.iteration_model import Iteration, IterationModel

LABEL = "model, not measured"
DEFAULT_RANKS, DEFAULT_LINK, DEFAULT_DEVICE = "1..2048", "25GB/s,5us", "v100"
MOST_RANKS = 2**20


def add(parser: argparse.ArgumentParser) -> None:
    """Add the arguments of ``rematplan kfac`` to ``parser``."""
    add_model(parser, problem_file=False)
    parser.add_argument(
        "--ranks",
        metavar="N..M",
        type=ranks,
        default=DEFAULT_RANKS,
        help="numbers of devices: doubled from N up to M, or a list N,M,…; each has --dim batch=samples; "
        f"default {DEFAULT_RANKS}",
    )
    parser.add_argument(
        "--costs",
        metavar="NAME",
        default=DEFAULT_DEVICE,
        help=f"the device model; default {DEFAULT_DEVICE}",
    )
    parser.add_argument(
        "--link",
        metavar="SPEED,DELAY",
        type=link,
        default=DEFAULT_LINK,
        help=f"bandwidth and latency of the network; default {DEFAULT_LINK}",
    )
    parser.add_argument(
        "--every",
        type=positive,
        default=1,
        metavar="N",
        help="take statistics in every N-th iteration; default 1",
    )
    parser.add_argument(
        "--inverse-every",
        type=positive,
        default=1,
        metavar="N",
        help="invert each factor in every N-th iteration; default 1",
    )
    parser.add_argument(
        "--approx",
        choices=("expand", "reduce"),
        default="expand",
        help="the form of the factors; default expand",
    )
    parser.add_argument("--png", type=Path, metavar="FILE", help="draw the times of SGD and K-FAC")


def ranks(text: str) -> tuple[int, ...]:
    """Read numbers of processes: ``8``, a list ``1,8,64``, or a range such as ``1..2048``, for 1, 2, 4, ..., 2048.

    The first number of a range is doubled as long as it is below the last; the last is always included.
    """
    first, dots, last = text.partition("..")
    found = [positive(part) for part in ([first, last] if dots else text.split(","))]
    if max(found) > MOST_RANKS or (dots and found[0] > found[1]):
        raise argparse.ArgumentTypeError(f"{text[:40]!r} is not of the form 1..2048, up to {MOST_RANKS}")
    return tuple(_doubled(*found)) if dots else tuple(dict.fromkeys(found))


def _doubled(first: int, last: int) -> Iterator[int]:
    """Yield ``first``, its doubles below ``last``, and ``last``."""
    while first < last:
        yield first
        first *= 2
    yield last


def link(text: str) -> tuple[float, float]:
    """Read the bandwidth in 10⁹ bytes per second and the latency in microseconds of a network link: ``25GB/s,5us``
    becomes (25.0, 5.0).
    """
    number = r"(\d+(?:\.\d+)?)"
    found = re.fullmatch(number + "GB/s," + number + "us", text)
    if not found or not float(found[1]):
        raise argparse.ArgumentTypeError(f"{text[:40]!r} is not of the form {DEFAULT_LINK}")
    return float(found[1]), float(found[2])


def run(args: argparse.Namespace, out: Output) -> int:
    """Run ``rematplan kfac``: model training iterations of SGD and of K-FAC, show them in tables and draw them. Return
    the exit status 0."""
    check_outputs(args.png)
    model, peaks = modelled(args, out)
    pairs = [(model.sgd(count), model.kfac(count)) for count in args.ranks]
    from rematplan.report.kfac_tables import breakdown_table, memory_table

    title = f"{model.plain.name} on {args.costs} ({LABEL})"
    out.show(breakdown_table(title, pairs), memory_table(f"memory a device ({LABEL})", pairs, peaks))
    if args.png:
        from rematplan.report.plot_breakdown import save_breakdown  # matplotlib is slow to load

        save_breakdown(args.png, title, pairs)
    out.data(document(args, model, pairs, peaks))
    return 0


def modelled(args: argparse.Namespace, out: Output) -> tuple[IterationModel, tuple[int, int]]:
    """Return a model of the training iterations of SGD and K-FAC, and the peaks of one process's step in bytes, without
    recomputation.

    The two peaks are those of the step without Kronecker factors (SGD) and of the step that computes them (K-FAC).
    """
    loaded = load_model(args, out, weightless=True)
    from rematplan import api
    from rematplan.optim.iteration_model import IterationModel, Link
    from rematplan.runtime.costs.device_models import device_model
    from rematplan.runtime.statistics.fisher_output_gradients import Draws
    from rematplan.runtime.statistics.insert import with_statistics
    from rematplan.runtime.statistics.options import Kronecker
    from rematplan.runtime.statistics.recorder import shapes

    options = Kronecker(fisher="empirical", approx=args.approx)
    counted = with_statistics(loaded.step, options, Draws(options.seed))
    device = device_model(args.costs)
    model = IterationModel(
        loaded.step, counted.step, shapes(counted), device, Link(*args.link), args.every, args.inverse_every
    )
    steps = (loaded, replace(loaded, step=counted.step))
    graphs = [api.problem(one, args.costs) for one in steps]
    plain, with_factors = (no_recompute(graph).estimate.peak for graph in graphs)
    return model, (plain, with_factors)


def document(
    args: argparse.Namespace,
    model: IterationModel,
    pairs: Sequence[tuple[Iteration, Iteration]],
    peaks: tuple[int, int],
) -> dict[str, Any]:
    """Return the JSON output of ``rematplan kfac``."""
    return {
        "model": model.plain.name,
        "kind": LABEL,
        "device_model": args.costs,
        "link": dict(zip(("gigabytes_a_second", "microseconds"), args.link, strict=True)),
        "layers": len(model.forms),
        "iterations": [
            {
                "ranks": one.ranks,
                "optimizer": name,
                "microseconds": one.total,
                "parts": dict(one.times),
                "state_bytes": one.state,
                "peak": peak,
            }
            for pair in pairs
            for name, one, peak in zip(("sgd", "kfac"), pair, peaks, strict=True)
        ],
    }
