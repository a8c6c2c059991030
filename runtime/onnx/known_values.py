"""Values that depend on no data, such as sizes and axes, stay NumPy arrays while a graph runs. Shape arithmetic
makes no calls in a capture."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor

from rematplan.ir.onnx.graph import Node, Weight
from rematplan.runtime.graph.compat import disable_current_modes
from rematplan.runtime.onnx.instructions import Instruction
from rematplan.runtime.onnx.ops.rows import Row
from rematplan.runtime.onnx.ops.shape import stated_sizes
from rematplan.runtime.onnx.ops.values import to_array, to_tensor

MAX_KNOWN = 4096
"""The largest number of elements of a value that stays a NumPy array."""

Value = Any
"""Tensor, np.ndarray, list or None: a tensor, a known value, a sequence, an absent input."""

SIZES: Mapping[str, Callable[[Node, Tensor], np.ndarray]] = {
    "Shape": lambda node, x: np.asarray(stated_sizes(node, x), np.int64),
    "Size": lambda _, x: np.asarray(math.prod(x.shape), np.int64),
}
"""Ops that need only a tensor's sizes: by name, a function from the node and the tensor to the result."""


def all_known(args: Iterable[Value]) -> bool:
    """Return whether all inputs of a node are known values or absent."""
    return all(a is None or isinstance(a, np.ndarray) for a in args)


def stays_small(row: Row, args: Sequence[np.ndarray | None]) -> bool:
    """Return whether the results of a node on known values are small enough to be known; random ones are not."""
    if row.random:
        return False
    if row.size is not None:
        return row.size(*args) <= MAX_KNOWN
    shapes = [a.shape for a in args if a is not None]
    try:
        return math.prod(np.broadcast_shapes(*shapes)) <= MAX_KNOWN
    except ValueError:  # not elementwise: gather, concatenation and the like
        return sum(math.prod(s) for s in shapes) <= MAX_KNOWN


def known_results(row: Row, node: Node, args: Sequence[np.ndarray | None]) -> tuple[Value, ...]:
    """Run a row on known values, invisible to any tracer, and return the results as arrays."""
    with disable_current_modes(), torch.no_grad():
        operands = [
            a if a is None or k in row.known | row.literal else to_tensor(a) for k, a in enumerate(args)
        ]
        results = row.run(node, *operands)
        return tuple(to_array(r) for r in (results if isinstance(results, tuple) else (results,)))


def wanted_as_tensors(program: Iterable[Instruction], known: Mapping[str, np.ndarray]) -> set[str]:
    """Return the known weights that an op reads as a tensor, to be buffers, so that they are on the module's device."""
    settled, wanted = {*known, ""}, set()
    for step in program:
        node, row = step.node, step.row
        if node.op in SIZES or (settled.issuperset(node.inputs) and not row.random):
            settled.update(node.outputs)
            continue
        for at, name in enumerate(node.inputs):
            if (
                name in known
                and at not in row.known | row.literal
                and not (row.scalars and known[name].size == 1)
            ):
                wanted.add(name)
    return wanted


def known_weights(weights: Iterable[Weight]) -> Mapping[str, np.ndarray]:
    """Return small constants as arrays."""
    small = (w for w in weights if w.role == "constant" and math.prod(w.shape) <= MAX_KNOWN)
    return {w.name: w.load() for w in small if w.dtype != "bfloat16"}
