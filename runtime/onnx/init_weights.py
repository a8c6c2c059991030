"""Random initial values for weights that an ONNX file fills with a constant instead of data.

Weights of products get a normal distribution of variance 1 / fan-in (LeCun, Bottou, Orr, Müller, «Efficient
BackProp», 1998), scales get ones, shifts get zeros.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping

import torch

from rematplan.ir.onnx.graph import Graph, Node
from rematplan.ir.onnx.weight_roles import VIEW_OPS

Fill = Callable[[torch.Tensor, Node, torch.Generator], object]


def _normal(fan_in: Callable[[torch.Tensor, Node], int]) -> Fill:
    return lambda tensor, node, generator: tensor.normal_(
        0.0, math.sqrt(1.0 / max(1, fan_in(tensor, node))), generator=generator
    )


def _with_deviation(deviation: float) -> Fill:
    return lambda tensor, node, generator: tensor.normal_(0.0, deviation, generator=generator)


def _constant(value: float) -> Fill:
    return lambda tensor, node, generator: tensor.fill_(value)


ZEROS, ONES = _constant(0.0), _constant(1.0)
SMALL_NORMAL = _with_deviation(0.02)

# The function that fills a weight, by the op of the weight's first reader and the weight's position among that
# node's inputs. All other weights get a normal distribution of small variance.
FILLS: Mapping[tuple[str, int], Fill] = {
    ("Add", 0): ZEROS,
    ("Add", 1): ZEROS,
    ("BatchNormalization", 1): ONES,
    ("BatchNormalization", 2): ZEROS,
    ("BatchNormalization", 3): ZEROS,
    ("BatchNormalization", 4): ONES,
    ("Conv", 1): _normal(lambda w, node: w[0].numel()),
    ("Conv", 2): ZEROS,
    ("ConvTranspose", 1): _normal(lambda w, node: w[:, 0].numel()),
    ("ConvTranspose", 2): ZEROS,
    ("Gemm", 1): _normal(lambda w, node: w.shape[1 if node.attributes.get("transB") else 0]),
    ("Gemm", 2): ZEROS,
    ("GroupNormalization", 1): ONES,
    ("GroupNormalization", 2): ZEROS,
    ("InstanceNormalization", 1): ONES,
    ("InstanceNormalization", 2): ZEROS,
    ("LayerNormalization", 1): ONES,
    ("LayerNormalization", 2): ZEROS,
    ("MatMul", 1): _normal(lambda w, node: w.shape[-2] if w.dim() > 1 else w.shape[0]),
    ("Mul", 0): ONES,
    ("Mul", 1): ONES,
    ("Div", 1): ONES,
    ("PRelu", 1): _constant(0.25),
    ("RMSNormalization", 1): ONES,
    ("Sub", 1): ZEROS,
}


def first_readers(graph: Graph) -> dict[str, tuple[Node, int]]:
    """Return, by the name of a value, the first node that reads it and the value's position among that node's inputs. A
    node that only rearranges elements is no reader; the first reader of its result is."""
    found: dict[str, tuple[Node, int]] = {}
    source: dict[str, str] = {}
    for node in graph.nodes:
        if node.op in VIEW_OPS and node.inputs:
            source[node.outputs[0]] = source.get(node.inputs[0], node.inputs[0])
            continue
        for at, name in enumerate(node.inputs):
            found.setdefault(source.get(name, name), (node, at))
    return found


def initialise(tensor: torch.Tensor, reader: tuple[Node, int] | None, seed: torch.Generator) -> None:
    """Fill a weight in place with random values, or a constant, that suits the node that reads it."""
    node, at = reader if reader is not None else (None, 0)
    fill = FILLS.get((node.op, at), SMALL_NORMAL) if node is not None else SMALL_NORMAL
    with torch.no_grad():
        fill(tensor, node, seed)  # type: ignore[arg-type]
