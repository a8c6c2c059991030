"""Constant folding: compute nodes of known inputs when an ONNX file is loaded, if the results are small.

Nodes that are not folded run in each step, so folding need not be complete.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np
import onnx
from onnx.reference import ReferenceEvaluator

from rematplan.ir.onnx.graph import Attribute, Node

MAX_ELEMENTS = 1 << 16  # the most elements of an operand or result

Arrays = Sequence[np.ndarray | None]
SizeRule = Callable[[Arrays], int]


def _largest(arrays: Arrays) -> int:
    return max((a.size for a in arrays if a is not None), default=0)


def _total(arrays: Arrays) -> int:
    return sum(a.size for a in arrays if a is not None)


def _broadcast(arrays: Arrays) -> int:
    return math.prod(np.broadcast_shapes(*(a.shape for a in arrays if a is not None)))


def _shape_operand(at: int) -> SizeRule:
    """Return the rule for the elements of a result whose shape is the operand number ``at``, counted from 0."""

    def size(arrays: Arrays) -> int:
        shape = arrays[at]
        return MAX_ELEMENTS + 1 if shape is None else math.prod(abs(int(d)) for d in shape.ravel())

    return size


def _expanded(arrays: Arrays) -> int:
    return _shape_operand(1)(arrays) * max(1, _largest(arrays[:1]))


def _range(arrays: Arrays) -> int:
    start, limit, delta = (float(np.asarray(a).reshape(())) for a in arrays)
    return max(0, math.ceil((limit - start) / delta))


def _gathered(arrays: Arrays) -> int:
    data, indices = arrays
    return MAX_ELEMENTS + 1 if data is None or indices is None else data.size * max(1, indices.size)


# Ops whose result has the broadcast shape of their operands.
BROADCASTING = (
    "Add", "And", "Div", "Equal", "Greater", "GreaterOrEqual", "Less", "LessOrEqual", "Max", "Min", "Mod",
    "Mul", "Not", "Or", "Pow", "Sub", "Sum", "Where", "Xor",
)  # fmt: skip

# Ops whose result is about as large as the largest operand, or smaller.
NO_LARGER = (
    "Abs", "Cast", "Ceil", "Exp", "Flatten", "Floor", "Log", "Neg", "Reciprocal", "Reshape", "Round",
    "Shape", "Sigmoid", "Sign", "Size", "Slice", "Split", "Sqrt", "Squeeze", "Tanh", "Transpose", "Trilu",
    "Unsqueeze", "ReduceMax", "ReduceMean", "ReduceMin", "ReduceProd", "ReduceSum", "CumSum", "Cos", "Sin",
    "Erf",
)  # fmt: skip

# By op: the rule that computes from the operands how many elements a result can have. Only these ops are folded.
SIZE_RULES: dict[str, SizeRule] = {
    **dict.fromkeys(BROADCASTING, _broadcast),
    **dict.fromkeys(NO_LARGER, _largest),
    "Concat": _total,
    "ConstantOfShape": _shape_operand(0),
    "Expand": _expanded,
    "Gather": _gathered,
    "Range": _range,
    "ScatterND": _largest,
    "Tile": _expanded,
}


def constant_value(node: Node) -> np.ndarray | None:
    """Return the value of an ONNX ``Constant`` node; None if the value is neither dense numbers nor strings."""
    forms: dict[str, Callable[[Attribute], np.ndarray]] = {
        "value": np.asarray,
        "value_float": lambda v: np.asarray(v, np.float32),
        "value_floats": lambda v: np.asarray(v, np.float32),
        "value_int": lambda v: np.asarray(v, np.int64),
        "value_ints": lambda v: np.asarray(v, np.int64),
        "value_string": lambda v: np.asarray(v, object),
        "value_strings": lambda v: np.asarray(v, object),
    }
    return next((forms[k](v) for k, v in node.attributes.items() if k in forms), None)


def fold(node: Node, known: Mapping[str, np.ndarray]) -> tuple[np.ndarray, ...] | None:
    """Compute a node's outputs from the values ``known`` by name. None if an input is unknown, the op has no size
    rule, the result is large, or computing it fails."""
    if node.domain or node.op not in SIZE_RULES or any(n and n not in known for n in node.inputs):
        return None
    arrays = [known[n] if n else None for n in node.inputs]
    try:
        if SIZE_RULES[node.op](arrays) > MAX_ELEMENTS:
            return None
        with np.errstate(all="ignore"):
            return _evaluate(node, arrays)
    except Exception:  # invalid operands: running the node reports them, with the node's name
        return None


def _evaluate(node: Node, arrays: Arrays) -> tuple[np.ndarray, ...]:
    """Compute a node's outputs with ONNX's reference evaluator. ``arrays``: its inputs, None if one is absent."""
    inputs = [f"i{k}" if a is not None else "" for k, a in enumerate(arrays)]
    outputs = [f"o{k}" for k in range(len(node.outputs))]
    attributes: dict[str, Any] = {
        k: onnx.numpy_helper.from_array(v) if isinstance(v, np.ndarray) else v
        for k, v in node.attributes.items()
    }
    value = onnx.helper.make_node(node.op, inputs, outputs, **attributes)
    graph = onnx.helper.make_graph(
        [value],
        "fold",
        [onnx.helper.make_value_info(n, onnx.TypeProto()) for n in inputs if n],
        [onnx.helper.make_value_info(n, onnx.TypeProto()) for n in outputs],
    )
    model = onnx.helper.make_model(graph, opset_imports=[onnx.helper.make_opsetid("", node.version)])
    feeds = {f"i{k}": a for k, a in enumerate(arrays) if a is not None}
    return tuple(np.asarray(r) for r in ReferenceEvaluator(model).run(None, feeds))
