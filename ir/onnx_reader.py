"""The protobuf wall: an ONNX file becomes plain data here, and no protobuf object goes further.

Everything that a file can get wrong before its meaning matters is refused here in one line: not readable,
not ONNX, truncated, tensors whose data do not fit their shape, external data outside the model's folder,
missing opsets.
"""

from __future__ import annotations

import itertools
import logging
import math
import os
from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import onnx_ir
import onnx_ir.passes.common as onnx_passes

from rematplan.ir.errors import ModelError
from rematplan.ir.graph import Attribute, Node

MAX_FUNCTION_NODES = 1_000_000  # after inlining; nested calls can otherwise grow exponentially
SUBGRAPH_KINDS = ("GRAPH", "GRAPHS")

logging.getLogger("onnx_ir").setLevel(logging.ERROR)  # what it warns of, we refuse in our own words

Dim = int | str | None


@dataclass(frozen=True, slots=True)
class Declared:
    """A graph input or output as declared; a dimension is an int, a symbol or None. No rank: no ``shape``."""

    name: str
    dtype: str
    shape: tuple[Dim, ...] | None


@dataclass(frozen=True, slots=True)
class Array:
    """A tensor with its data behind a reader."""

    name: str
    dtype: str
    shape: tuple[int, ...]
    load: Callable[[], np.ndarray] = field(compare=False, repr=False)


@dataclass(frozen=True)
class Draft:
    """The file's main graph, functions inlined, before any analysis."""

    name: str
    inputs: tuple[Declared, ...]
    outputs: tuple[Declared, ...]
    initialisers: Mapping[str, Array]
    nodes: tuple[Node, ...]


def read_onnx(path: Path) -> Draft:
    """Read an ONNX file.

    Raises:
        ModelError: the file cannot be read, is not ONNX, or breaks a rule of the format.
    """
    return read_proto(_parse(path), path)


def read_proto(proto: onnx.ModelProto, path: Path) -> Draft:
    """The same for a model in memory; ``path`` is where its external data would lie beside, and its name.

    Raises:
        ModelError: as :func:`read_onnx`.
    """
    try:
        _check_tensors(proto)
        _check_names(proto.graph)
        _check_expansion(proto)
        model = onnx_ir.from_proto(proto)
        _pin_function_opsets(model)
        onnx_passes.InlinePass()(model)
        return _draft(model, path)
    except ModelError as error:
        raise ModelError(f"{path}: {error}") from None
    except (MemoryError, KeyboardInterrupt):
        raise
    except (
        Exception
    ) as error:  # the reader libraries raise many types on broken input; all mean the same to a user
        raise ModelError(f"{path}: is no valid ONNX model: {_innermost(error)}") from None


def _parse(path: Path) -> onnx.ModelProto:
    """The file as a protobuf message that at least looks like a model."""
    try:
        data = Path(path).read_bytes()
    except OSError as error:
        raise ModelError(f"{path}: cannot be read: {error.strerror}") from None
    if not data:
        raise ModelError(f"{path}: is empty")
    proto = onnx.ModelProto()
    try:
        proto.ParseFromString(data)
    except Exception:  # google.protobuf's DecodeError, or what its back ends raise instead
        raise ModelError(f"{path}: is no ONNX model, or is truncated") from None
    if not proto.HasField("graph") or not (proto.graph.node or proto.graph.output):
        raise ModelError(f"{path}: is no ONNX model: it holds no graph")
    return proto


def _innermost(error: BaseException) -> str:
    """The first cause's message as one short line."""
    while error.__cause__ is not None:
        error = error.__cause__
    text = " ".join(str(error).split()) or type(error).__name__
    return text if len(text) < 200 else text[:197] + "..."


# ------------------------------------------------------------------ checks on the protobuf message


def _check_tensors(proto: onnx.ModelProto) -> None:
    """Refuse tensors whose data do not fit their shape, before anything allocates by that shape."""
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
        for attribute in nodes.pop().attribute:
            for tensor in (*([attribute.t] if attribute.HasField("t") else []), *attribute.tensors):
                _check_tensor(tensor)
            graphs.extend(attribute.graphs)
            if attribute.HasField("g"):
                graphs.append(attribute.g)


def _check_tensor(tensor: onnx.TensorProto) -> None:
    what = f"tensor {tensor.name!r}"
    if any(d < 0 for d in tensor.dims):
        raise ModelError(f"{what} has a negative dimension")
    try:
        kind = onnx_ir.DataType(tensor.data_type)
        bits = 0 if kind == onnx_ir.DataType.STRING else kind.bitwidth
    except (ValueError, TypeError):
        raise ModelError(f"{what} has the unknown data type {tensor.data_type}") from None
    if tensor.data_location == onnx.TensorProto.EXTERNAL:
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


def _check_names(graph: onnx.GraphProto) -> None:
    """Every value is stated once and every read one is stated."""
    _once((i.name for i in graph.input), "graph inputs")
    _once((t.name for t in graph.initializer), "initialisers")
    known = {i.name for i in graph.input} | {t.name for t in graph.initializer}
    for node in graph.node:
        if not node.op_type or not node.op_type.isprintable():
            raise ModelError(f"node {node.name!r} has the op type {node.op_type!r}, which is no name")
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


def _check_expansion(proto: onnx.ModelProto) -> None:
    """Refuse local functions that call themselves, or that expand to an absurd number of nodes."""
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


# ------------------------------------------------------------------ from onnx-ir to plain data


def _pin_function_opsets(model: Any) -> None:
    """Write each function's own opsets onto its nodes, so that inlining keeps them."""
    for function in model.functions.values():
        for node in function.graph:
            node.version = function.opset_imports.get(node.domain, node.version)


def _draft(model: Any, path: Path) -> Draft:
    graph = model.graph
    initialisers = {name: _array(name, value.const_value, path) for name, value in graph.initializers.items()}
    opsets = {_domain(d): v for d, v in model.opset_imports.items()}
    return Draft(
        name=graph.name or path.stem,
        inputs=tuple(_declared(v, "input") for v in graph.inputs if v.name not in initialisers),
        outputs=tuple(_declared(v, "output") for v in graph.outputs),
        initialisers=initialisers,
        nodes=_nodes(graph, opsets, path),
    )


def _domain(domain: str) -> str:
    return "" if domain == "ai.onnx" else domain


def _declared(value: Any, kind: str) -> Declared:
    if value.type is None:
        dtype = ""
    elif isinstance(value.type, onnx_ir.TensorType):
        dtype = _dtype(value.type.dtype, f"{kind} {value.name!r}")
    else:
        raise ModelError(f"the graph {kind} {value.name!r} is no tensor but a {type(value.type).__name__}")
    if kind == "input" and not dtype:
        raise ModelError(f"the graph input {value.name!r} states no type")
    shape = None if value.shape is None else tuple(d if isinstance(d, int) else d.value for d in value.shape)
    return Declared(value.name, dtype, shape)


def _dtype(kind: Any, what: str) -> str:
    try:
        return str(kind.numpy().name)
    except TypeError:
        raise ModelError(f"{what} has no element type that can be computed with") from None


def _nodes(graph: Any, opsets: Mapping[str, int], path: Path) -> tuple[Node, ...]:
    taken: set[str] = set()
    nodes = []
    for i, node in enumerate(graph):
        domain = _domain(node.domain)
        version = node.version if node.version is not None else opsets.get(domain)
        if version is None:
            raise ModelError(
                f"node {node.name!r} ({node.op_type}): the file imports no opset of domain {domain!r}"
            )
        name = _fresh(node.name or f"{node.op_type}_{i}", taken)
        _check_signature(node, name, domain, version)
        nodes.append(
            Node(
                name=name,
                op=node.op_type,
                domain=domain,
                version=version,
                inputs=tuple(v.name if v is not None else "" for v in node.inputs),
                outputs=tuple(v.name or "" for v in node.outputs),
                attributes=_attributes(node, name, path),
            )
        )
    return tuple(nodes)


def _check_signature(node: Any, name: str, domain: str, version: int) -> None:
    """Refuse a node that its op's schema does not allow: too few inputs, attributes of another kind.

    An op without a schema is none of ONNX's; whoever runs the graph knows it or refuses it.
    """
    try:
        schema = onnx.defs.get_schema(node.op_type, version, domain)
    except onnx.defs.SchemaError:
        return
    if not schema.min_input <= len(node.inputs) <= schema.max_input:
        wanted = f"{schema.min_input} to {schema.max_input}"
        raise ModelError(f"node {name!r} ({node.op_type}) has {len(node.inputs)} inputs, not {wanted}")
    if any(v is None for v in node.inputs[: schema.min_input]):
        raise ModelError(f"node {name!r} ({node.op_type}) lacks an input that it needs")
    for key, attribute in node.attributes.items():
        known = schema.attributes.get(key)
        wanted = str(known.type).rpartition(".")[2] if known is not None else attribute.type.name
        if wanted != attribute.type.name:
            kinds = f"{attribute.type.name}, not {wanted}"
            raise ModelError(f"node {name!r} ({node.op_type}): attribute {key!r} is of kind {kinds}")


def _fresh(name: str, taken: set[str]) -> str:
    candidates = itertools.chain([name], (f"{name}_{k}" for k in itertools.count(2)))
    name = next(c for c in candidates if c not in taken)
    taken.add(name)
    return name


def _attributes(node: Any, name: str, path: Path) -> dict[str, Attribute]:
    found: dict[str, Attribute] = {}
    for key, attribute in node.attributes.items():
        kind = attribute.type.name
        if kind in SUBGRAPH_KINDS:
            raise ModelError(f"node {name!r}: {node.op_type} holds a subgraph, which is not supported")
        if kind in ("INT", "FLOAT", "STRING"):
            found[key] = attribute.value
        elif kind in ("INTS", "FLOATS", "STRINGS"):
            found[key] = tuple(attribute.value)
        elif kind == "TENSOR":
            tensor = attribute.value
            if isinstance(tensor, onnx_ir.ExternalTensor):
                tensor = _external(f"{name}.{key}", tensor, path)
            found[key] = _native(np.asarray(tensor.numpy()))
        else:
            raise ModelError(
                f"node {name!r} ({node.op_type}): attribute {key!r} of kind {kind} is not supported"
            )
    return found


def _native(array: np.ndarray) -> np.ndarray:
    """The array in the machine's byte order."""
    return array if array.dtype.isnative else array.astype(array.dtype.newbyteorder("="))


def _array(name: str, tensor: Any, path: Path) -> Array:
    dtype = _dtype(tensor.dtype, f"initialiser {name!r}")
    shape = tuple(int(d) for d in tensor.shape)
    if isinstance(tensor, onnx_ir.ExternalTensor):
        tensor = _external(name, tensor, path)

    def load() -> np.ndarray:
        try:
            return _native(np.asarray(tensor.numpy()))
        except Exception as error:  # a file may change or vanish between planning and reading
            raise ModelError(f"{path}: initialiser {name!r} cannot be read: {_innermost(error)}") from None

    return Array(name, dtype, shape, load)


def _external(name: str, tensor: Any, path: Path) -> Any:
    """The external tensor, once its place is known to lie in the model's folder and to be large enough.

    A model that is a link into a cache of files has two folders: the link's and its target's.
    """
    what = f"initialiser {name!r}: external data {str(tensor.location)!r}"
    location = Path(str(tensor.location))
    if location.is_absolute() or ".." in location.parts or not location.parts:
        raise ModelError(f"{what} lies outside the model's folder")
    target = Path(os.path.realpath(path.parent / location))
    folders = {Path(os.path.realpath(path.parent)), Path(os.path.realpath(path)).parent}
    if not any(target.is_relative_to(folder) for folder in folders):
        raise ModelError(f"{what} lies outside the model's folder")
    try:
        size = target.stat().st_size
    except OSError as error:
        raise ModelError(f"{what} cannot be read: {error.strerror}") from None
    if not target.is_file():
        raise ModelError(f"{what} is no file")
    start, length = tensor.offset or 0, tensor.length
    needed = (math.prod(tensor.shape) * tensor.dtype.bitwidth + 7) // 8
    if start < 0 or start + needed > size or (length is not None and length != needed):
        raise ModelError(
            f"{what} holds {size} bytes; {needed} from byte {start} are needed (length stated: {length})"
        )
    return onnx_ir.ExternalTensor(
        target.name,
        tensor.offset,
        needed,
        tensor.dtype,
        shape=tensor.shape,
        name=name,
        base_dir=str(target.parent),
    )
