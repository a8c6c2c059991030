"""Infer shapes in an ONNX graph with subgraphs, whose conditions and lengths often depend on shapes.

Constants are folded first, because ONNX's inference cannot see through the nodes that compute them.
"""

from __future__ import annotations

import math

import numpy as np
import onnx

from rematplan.ir.onnx import weight_roles as roles
from rematplan.ir.onnx.constant_folding import MAX_ELEMENTS, constant_value, fold
from rematplan.ir.onnx.draft import Dim, Draft

MAX_BYTES = 1 << 28  # no inference for larger files, because it copies the weights


def inferred_shapes(proto: onnx.ModelProto, draft: Draft) -> dict[str, tuple[Dim, ...]]:
    """Return shapes of the main graph's values by name: those of ``draft.stated``, unchanged, and those that ONNX
    infers. None are inferred if there are no subgraphs, the model exceeds ``MAX_BYTES``, or the inference fails."""
    if not draft.bodies or proto.ByteSize() > MAX_BYTES:
        return dict(draft.stated)
    try:
        values = onnx.shape_inference.infer_shapes(_folded(proto, draft), data_prop=True).graph.value_info
    except Exception:  # the inference refuses some graphs that can run; shapes are optional
        return dict(draft.stated)
    shapes: dict[str, tuple[Dim, ...]] = {
        v.name: tuple(d.dim_value if d.HasField("dim_value") else d.dim_param or None for d in kind.shape.dim)
        for v in values
        if (kind := v.type.tensor_type).HasField("shape")
    }
    return shapes | dict(draft.stated)


def _folded(proto: onnx.ModelProto, draft: Draft) -> onnx.ModelProto:
    """Return a copy of the model in which small integer constants replace the nodes that compute them."""
    known = {
        name: array.load()
        for name, array in draft.initialisers.items()
        if array.dtype not in roles.FLOATS and math.prod(array.shape) <= MAX_ELEMENTS
    }
    made: dict[str, np.ndarray] = {}
    for node in draft.nodes:
        value = constant_value(node) if node.op == "Constant" and not node.domain else None
        results = fold(node, known) if value is None else (value,)
        for name, array in zip(node.outputs, results or (), strict=False):
            if name and array.size <= MAX_ELEMENTS and array.dtype.kind in "biu":
                known[name] = made[name] = array
    copy = onnx.ModelProto()
    copy.CopyFrom(proto)
    left = [n for n in copy.graph.node if not n.output or not all(o in made for o in n.output)]
    del copy.graph.node[:]
    copy.graph.node.extend(left)
    still = {o for n in left for o in n.output}
    stated = (onnx.numpy_helper.from_array(a, name) for name, a in made.items() if name not in still)
    copy.graph.initializer.extend(stated)
    return copy
