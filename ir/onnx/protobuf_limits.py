"""Checks of an ONNX file's protobuf message, made before memory is allocated for anything that it describes."""

from __future__ import annotations

import math
import re
from collections import Counter
from typing import Any

import onnx
import onnx_ir

from rematplan.ir.errors import ModelError

MAX_FUNCTION_NODES = 1_000_000  # after inlining; nested calls can otherwise grow exponentially

NEWEST_IR, NEWEST_OPSET = 14, 28
"""The newest version of the file format, and of ONNX's own operators, whose meaning is known here (ONNX 1.23)."""


def check_versions(proto: onnx.ModelProto) -> None:
    """Raise `ModelError` if an ONNX file is of a newer version than those known here, which may have changed any
    operator."""
    opsets = (o.version for o in proto.opset_import if o.domain in ("", "ai.onnx"))
    for what, version, newest in (
        ("IR version", proto.ir_version, NEWEST_IR),
        *(("opset", version, NEWEST_OPSET) for version in opsets),
    ):
        if version > newest:
            raise ModelError(
                f"its {what} is {version}; the newest known is {newest}: export it with an older one"
            )


def check_tensors(proto: onnx.ModelProto) -> None:
    """Raise `ModelError` if a tensor of an ONNX file is sparse, or its data do not match its shape. Of external
    tensors, offset and length are checked."""
    if proto.graph.sparse_initializer:
        raise ModelError("sparse initialisers are not supported")
    graphs = [proto.graph]
    nodes: list[onnx.NodeProto] = [n for f in proto.functions for n in f.node]
    while graphs or nodes:
        if graphs:
            graph = graphs.pop()
            for tensor in graph.initializer:
                _check_tensor(tensor)
            nodes.extend(graph.node)
            continue
        node = nodes.pop()
        for attribute in node.attribute:
            if attribute.HasField("sparse_tensor") or attribute.sparse_tensors:
                raise ModelError(f"node {_label(node)} holds a sparse tensor, which is not supported")
            for tensor in (*([attribute.t] if attribute.HasField("t") else []), *attribute.tensors):
                _check_tensor(tensor)
            graphs.extend(attribute.graphs)
            if attribute.HasField("g"):
                graphs.append(attribute.g)


def _check_tensor(tensor: onnx.TensorProto) -> None:
    """Raise `ModelError` for a negative dimension, an unknown type, data of another size than shape and type say,
    or a malformed offset or length of external data."""
    what = f"tensor {tensor.name!r}"
    if any(d < 0 for d in tensor.dims):
        raise ModelError(f"{what} has a negative dimension")
    try:
        kind = onnx_ir.DataType(tensor.data_type)
        bits = 0 if kind == onnx_ir.DataType.STRING else kind.bitwidth
    except (ValueError, TypeError):
        raise ModelError(f"{what} has the unknown data type {tensor.data_type}") from None
    if tensor.data_location == onnx.TensorProto.EXTERNAL:
        for entry in tensor.external_data:
            if entry.key in ("offset", "length") and not re.fullmatch("[0-9]{1,19}", entry.value):
                raise ModelError(f"{what}: the {entry.key} of its external data is {entry.value[:40]!r}")
        return
    elements = math.prod(tensor.dims)
    if tensor.HasField("raw_data"):
        wanted, found, unit = (elements * bits + 7) // 8, len(tensor.raw_data), "bytes"
    else:
        fields = ("float_data", "int32_data", "string_data", "int64_data", "double_data", "uint64_data")
        found = sum(len(getattr(tensor, f)) for f in fields)
        per_value = max(1, 8 // bits) if bits else 1  # packed four- and two-bit types
        pair = 2 if kind in (onnx_ir.DataType.COMPLEX64, onnx_ir.DataType.COMPLEX128) else 1
        wanted, unit = -(-elements * pair // per_value), "values"
    if wanted != found:
        shape = "×".join(map(str, tensor.dims)) or "scalar"
        raise ModelError(f"{what} of shape {shape} needs {wanted} {unit} of data, the file has {found}")


def check_types(graph: onnx.GraphProto) -> None:
    """Raise `ModelError` if a graph input or output states a type that is no dense tensor."""
    for kind, values in (("input", graph.input), ("output", graph.output)):
        for value in values:
            stated = value.type.WhichOneof("value") or "tensor_type"
            if stated != "tensor_type":
                found = stated.removesuffix("_type").replace("_", " ")
                raise ModelError(f"the graph {kind} {value.name!r} is not a tensor, but of type {found}")


def check_names(graph: onnx.GraphProto) -> None:
    """Raise `ModelError` if a value of a graph is written twice, or read but not written. Subgraphs are not checked."""
    _once((i.name for i in graph.input), "graph inputs")
    _once((t.name for t in graph.initializer), "initialisers")
    known = {i.name for i in graph.input} | {t.name for t in graph.initializer}
    for node in graph.node:
        if not node.op_type or not node.op_type.isprintable():
            raise ModelError(f"node {node.name!r} has the op type {node.op_type!r}, which is not a name")
        for name in filter(None, node.output):
            if name in known:
                raise ModelError(f"the value {name!r} is written twice (again by node {_label(node)})")
            known.add(name)
    for node in graph.node:
        for name in filter(None, node.input):
            if name not in known:
                raise ModelError(f"node {_label(node)} reads {name!r}, which nothing writes")
    for output in graph.output:
        if output.name not in known:
            raise ModelError(f"the graph output {output.name!r} is written by no node")


def _once(names: Any, kind: str) -> None:
    for name, count in Counter(names).items():
        if count > 1:
            raise ModelError(f"{count} {kind} share the name {name!r}")


def _label(node: onnx.NodeProto) -> str:
    return f"{node.name!r} ({node.op_type})"


def check_expansion(proto: onnx.ModelProto) -> None:
    """Raise `ModelError` if a model's local functions call themselves, are nested more than 100 deep, or expand to
    more than `MAX_FUNCTION_NODES` nodes."""
    bodies = {(f.domain, f.name, f.overload): f for f in proto.functions}
    size: dict[tuple[str, str, str], int] = {}

    def expanded(key: tuple[str, str, str], above: tuple[Any, ...]) -> int:
        if key in above:
            raise ModelError(f"the local function {key[1]!r} calls itself")
        if len(above) > 100:
            raise ModelError("local functions are nested more than 100 deep")
        if key not in size:
            size[key] = sum(cost(n, (*above, key)) for n in bodies[key].node)
        return size[key]

    def cost(node: onnx.NodeProto, above: tuple[Any, ...]) -> int:
        key = (node.domain, node.op_type, node.overload)
        return expanded(key, above) if key in bodies else 1

    if bodies and sum(cost(n, ()) for n in proto.graph.node) > MAX_FUNCTION_NODES:
        raise ModelError(f"its local functions expand to more than {MAX_FUNCTION_NODES} nodes")
