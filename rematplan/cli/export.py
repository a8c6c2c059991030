"""``rematplan export``: write a network of the zoo as an ONNX file."""

from __future__ import annotations

import argparse
from collections.abc import Mapping
from pathlib import Path

from rematplan.cli.arguments import check_outputs, dimension, dimensions
from rematplan.cli.output import Output
from rematplan.cli.problem_source import zoo_errors, zoo_sizes
from rematplan.ir import show_bytes
from rematplan.models.names import check_known


def add(parser: argparse.ArgumentParser) -> None:
    """Add the arguments of ``rematplan export`` to ``parser``."""
    parser.add_argument("name", metavar="NAME", help="a network of the zoo (see: rematplan info models)")
    parser.add_argument(
        "--dim",
        type=dimension,
        action="append",
        metavar="NAME=SIZE",
        help="a size of the network, such as batch=8; may be repeated",
    )
    parser.add_argument(
        "-o", "--output", type=Path, required=True, metavar="FILE.onnx", help="the file to write"
    )
    parser.add_argument(
        "--static-batch",
        action="store_true",
        help="fix the batch size; by default it is a symbolic dimension named batch",
    )


def run(args: argparse.Namespace, out: Output) -> int:
    """Run ``rematplan export``: write a network, with weights of a fixed seed, as an ONNX file. Return 0."""
    check_outputs(args.output)
    sizes = zoo_sizes(args.name, dimensions(args.dim or ()))
    with zoo_errors(), out.progress(f"exporting {args.name}"):
        shapes = write_network(args.name, sizes, args.output, dynamic_batch=not args.static_batch)
    size, batch = args.output.stat().st_size, shapes[0][0]
    named = shapes if args.static_batch else [("batch", *shape[1:]) for shape in shapes]
    out.show(
        f"{args.output}: {args.name} for training, {show_bytes(size)}, "
        f"input {', '.join('×'.join(map(str, shape)) for shape in named)}"
        + ("" if args.static_batch else f"; bind its batch with --dim batch={batch}")
    )
    inputs = [list(shape) for shape in named]
    out.data({"model": args.name, "file": args.output, "bytes": size, "input": inputs[0], "inputs": inputs})
    return 0


def write_network(
    name: str, sizes: Mapping[str, int | None], path: Path, *, dynamic_batch: bool = True
) -> list[tuple[int, ...]]:
    """Export a network of the zoo in training form, with weights of a fixed seed, as an ONNX file. Its batch is
    symbolic if ``dynamic_batch``. Return the shapes of its inputs; `ZooError` for an unknown network or impossible
    sizes."""
    check_known(name)
    import torch  # imported here, since `rematplan --help` does not need it

    from rematplan.models import build, example_inputs, export_onnx

    inputs = example_inputs(name, **sizes)  # type: ignore[arg-type]  # no size is named seed
    with torch.random.fork_rng():
        torch.manual_seed(0)
        model = build(name, **sizes)
    export_onnx(model, inputs, path, dynamic_batch=dynamic_batch)
    return [tuple(x.shape) for x in inputs]
