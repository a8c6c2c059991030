"""Read an ONNX file into plain data (`Draft`) without protobuf objects. A file that violates the format is
refused in one line.
"""

from __future__ import annotations

import ast
import itertools
import logging
import math
import os
import re
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import onnx_ir
import onnx_ir.passes.common as onnx_passes

from rematplan.ir.errors import ModelError
from rematplan.ir.onnx.draft import Array, Body, Declared, Draft, Origin, Scope
from rematplan.ir.onnx.graph import Attribute, Node
from rematplan.ir.onnx.protobuf_limits import (
    check_expansion,
    check_names,
    check_tensors,
    check_types,
    check_versions,
)
from rematplan.ir.onnx.subgraph_shapes import inferred_shapes

MAX_METADATA = 1 << 16  # longer metadata entries are ignored (characters)
MAX_DEPTH = 50  # the most levels of subgraphs in subgraphs

logging.getLogger("onnx_ir").setLevel(logging.ERROR)  # what it warns of is refused below, more clearly


def read_proto(proto: onnx.ModelProto, path: Path) -> Draft:
    """Convert an ONNX model in memory to plain data, with functions inlined; `ModelError` if it is invalid or not
    supported. ``path``: names the model in messages; external data are expected next to it."""
    try:
        check_versions(proto)
        check_tensors(proto)
        check_types(proto.graph)
        check_names(proto.graph)
        check_expansion(proto)
        model = onnx_ir.from_proto(proto)
        _pin_function_opsets(model)
        onnx_passes.InlinePass()(model)
        draft = replace(_draft(model, path), origins=_origins(proto), producer=proto.producer_name)
        return replace(draft, stated=inferred_shapes(proto, draft))
    except ModelError as error:
        raise ModelError(f"{path}: {error}") from None
    except MemoryError:
        raise
    except Exception as error:  # the libraries raise many types on broken input; all mean the same to a user
        raise ModelError(f"{path}: is not a valid ONNX model: {_innermost(error)}") from None


def read_file(path: Path) -> onnx.ModelProto:
    """Return the protobuf message of an ONNX file. `ModelError`, which names the file, if it cannot be read or is no
    ONNX model, or its graph has neither nodes nor outputs."""
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
        raise ModelError(f"{path}: is not an ONNX model, or is truncated") from None
    if not proto.HasField("graph") or not (proto.graph.node or proto.graph.output):
        raise ModelError(f"{path}: is not an ONNX model: it has no graph")
    return proto


def _innermost(error: BaseException) -> str:
    """Return the message of the exception that first caused ``error`` (``__cause__``), as one short line."""
    while error.__cause__ is not None:
        error = error.__cause__
    text = " ".join(str(error).split()) or type(error).__name__
    return text if len(text) < 200 else text[:197] + "..."


# ------------------------------------------------------------------ from onnx-ir to plain data


def _pin_function_opsets(model: Any) -> None:
    """Write the opset versions of an onnx-ir model's local functions onto their nodes, and empty the
    functions' lists.
    """
    for function in model.functions.values():
        for node in function.graph.all_nodes():
            node.version = function.opset_imports.get(node.domain, node.version)
        # The inliner refuses functions whose opsets differ from the model's.
        function.opset_imports.clear()


def _draft(model: Any, path: Path) -> Draft:
    """Convert an onnx-ir model's main graph to plain data. ``path``: the model's file, for external data."""
    graph = model.graph
    initialisers = _initialisers(graph, path)
    reading = _Reading({_domain(d): v for d, v in model.opset_imports.items()}, path)
    nodes = reading.nodes(graph)
    names = {place: name for place, _, name in STATED_KIND.findall(graph.metadata_props.get(SIGNATURE, ""))}
    return Draft(
        name=graph.name or path.stem,
        inputs=tuple(_declared(v, "input") for v in graph.inputs if v.name not in initialisers),
        outputs=tuple(_declared(v, "output") for v in graph.outputs),
        initialisers=initialisers,
        nodes=nodes,
        signed=bool(names),
        scopes={n.name: s for n, stated in zip(nodes, graph, strict=True) if (s := _scope(stated, names))},
        bodies=reading.bodies,
        stated={
            v.name: tuple(d if isinstance(d, int) else d.value for d in v.shape)
            for node in (graph if reading.bodies else ())
            for v in node.outputs
            if v.name and v.shape is not None
        },
    )


def _initialisers(graph: Any, path: Path) -> dict[str, Array]:
    return {name: _array(name, value.const_value, path) for name, value in graph.initializers.items()}


# ------------------------------------------------------------------ what torch's exporter notes in the metadata

KIND = "pkg.torch.export.graph_signature.InputSpec.kind"
SIGNATURE = "pkg.torch.export.ExportedProgram.graph_signature"
# A line of the signature: what fx nodes call a tensor of the module, its kind, its name.
STATED_KIND = re.compile(r"^(\S+): ([A-Z_]+) target='([^'\n]+)'", re.MULTILINE)
FOLDED = "pkg.onnxscript.optimizer.folded_from"
SCOPES, OPERATORS = "pkg.torch.onnx.name_scopes", "pkg.torch.onnx.class_hierarchy"
FX_NODE = "pkg.torch.onnx.fx_node"


def _origins(proto: onnx.ModelProto) -> dict[str, Origin]:
    """Return what the metadata say about the module's tensors and initialisers, by name; those without
    metadata are absent.
    """
    signature = next((p.value for p in proto.graph.metadata_props if p.key == SIGNATURE), "")
    stated = {name: Origin(kind) for _, kind, name in STATED_KIND.findall(signature)}
    said: dict[str, dict[str, str]] = {t.name: {} for t in proto.graph.initializer}
    for entry in (*proto.graph.value_info, *proto.graph.initializer):
        if entry.name in said and entry.metadata_props:
            said[entry.name].update((p.key, p.value) for p in entry.metadata_props)
    return stated | {
        name: Origin(props.get(KIND, ""), _listed(props.get(FOLDED, "")))
        for name, props in said.items()
        if KIND in props or FOLDED in props
    }


def _scope(node: Any, names: Mapping[str, str]) -> Scope | None:
    """Return what a node's metadata say; None if they are incomplete. ``names``: of the module's tensors, by what fx
    nodes call them."""
    props = node.metadata_props
    modules, operators = _listed(props.get(SCOPES, "")), _listed(props.get(OPERATORS, ""))
    called = re.findall(r"%(\w+)", props.get(FX_NODE, "")[:MAX_METADATA])
    reads = tuple(names[c] for c in called if c in names)
    return Scope(modules[-2], operators[-1], reads) if len(modules) > 1 and operators else None


def _listed(text: str) -> tuple[str, ...]:
    """Parse a list of strings, written as Python source text by torch's exporter. Other text gives an empty tuple."""
    if not text.startswith("[") or len(text) > MAX_METADATA:
        return ()
    try:
        found = ast.literal_eval(text)
    except (ValueError, SyntaxError, RecursionError, MemoryError):
        return ()
    return tuple(v for v in found if isinstance(v, str))


def _domain(domain: str) -> str:
    return "" if domain == "ai.onnx" else domain


def _declared(value: Any, kind: str) -> Declared:
    dtype = "" if value.type is None else _dtype(value.type.dtype, f"{kind} {value.name!r}")
    if kind == "input" and not dtype:
        raise ModelError(f"the graph input {value.name!r} states no type")
    shape = None if value.shape is None else tuple(d if isinstance(d, int) else d.value for d in value.shape)
    return Declared(value.name, dtype, shape)


def _dtype(kind: Any, what: str) -> str:
    try:
        return str(kind.numpy().name)
    except TypeError:
        raise ModelError(f"{what} has no element type that can be computed with") from None


@dataclass
class _Reading:
    """Converts the nodes of an onnx-ir graph to plain data, and collects their subgraphs in ``bodies``."""

    opsets: Mapping[str, int]
    """The model's versions by domain."""
    path: Path
    """The model's file, for external data."""
    used: set[str] = field(default_factory=set)
    """Node names in use."""
    bodies: dict[str, dict[str, Body]] = field(default_factory=dict)
    """By node name and attribute."""

    def nodes(self, graph: Any, depth: int = 0) -> tuple[Node, ...]:
        if depth > MAX_DEPTH:
            raise ModelError(f"subgraphs are nested more than {MAX_DEPTH} deep")
        return tuple(self._node(i, node, depth) for i, node in enumerate(graph))

    def _node(self, at: int, node: Any, depth: int) -> Node:
        """Return a node as plain data, with a unique name, and record its subgraphs in ``bodies``. `ModelError` if it
        is not valid. ``at``: its position, for the name of an unnamed one."""
        domain = _domain(node.domain)
        version = node.version if node.version is not None else self.opsets.get(domain)
        if version is None:
            raise ModelError(
                f"node {node.name!r} ({node.op_type}): the file imports no opset of domain {domain!r}"
            )
        name = _fresh(node.name or f"{node.op_type}_{at}", self.used)
        _check_signature(node, name, domain, version)
        graphs = {k: a.value for k, a in node.attributes.items() if a.type.name == "GRAPH"}
        if graphs:
            self.bodies[name] = {k: self._body(g, depth + 1) for k, g in graphs.items()}
        return Node(
            name=name,
            op=node.op_type,
            domain=domain,
            version=version,
            inputs=tuple(v.name if v is not None else "" for v in node.inputs),
            outputs=tuple(v.name or "" for v in node.outputs),
            attributes=_attributes(node, name, self.path),
        )

    def _body(self, graph: Any, depth: int) -> Body:
        return Body(
            tuple(v.name for v in graph.inputs),
            tuple(v.name for v in graph.outputs),
            _initialisers(graph, self.path),
            self.nodes(graph, depth),
        )


def _check_signature(node: Any, name: str, domain: str, version: int) -> None:
    """Raise `ModelError` if a node's inputs or kinds of attributes differ from ONNX's schema. Ops without a schema
    are not checked."""
    try:
        schema = onnx.defs.get_schema(node.op_type, version, domain)
    except onnx.defs.SchemaError:
        return
    if not schema.min_input <= len(node.inputs) <= schema.max_input:
        wanted = f"{schema.min_input} to {schema.max_input}"
        raise ModelError(f"node {name!r} ({node.op_type}) has {len(node.inputs)} inputs, not {wanted}")
    needed = onnx.defs.OpSchema.FormalParameterOption.Single
    if any(v is None and p.option == needed for v, p in zip(node.inputs, schema.inputs, strict=False)):
        raise ModelError(f"node {name!r} ({node.op_type}) lacks an input that it needs")
    for key, attribute in node.attributes.items():
        known = schema.attributes.get(key)
        wanted = str(known.type).rpartition(".")[2] if known is not None else attribute.type.name
        if wanted != attribute.type.name:
            kinds = f"{attribute.type.name}, not {wanted}"
            raise ModelError(f"node {name!r} ({node.op_type}): attribute {key!r} is of kind {kinds}")


def _fresh(name: str, used: set[str]) -> str:
    candidates = itertools.chain([name], (f"{name}_{k}" for k in itertools.count(2)))
    name = next(c for c in candidates if c not in used)
    used.add(name)
    return name


def _attributes(node: Any, name: str, path: Path) -> dict[str, Attribute]:
    """Return a node's attributes as plain data, without subgraphs; `ModelError` for kinds that are not supported."""
    found: dict[str, Attribute] = {}
    for key, attribute in node.attributes.items():
        kind = attribute.type.name
        if kind == "GRAPH":  # read separately
            continue
        if kind == "GRAPHS":
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
    """Return the array, converted to the machine's byte order if it has the other one."""
    return array if array.dtype.isnative else array.astype(array.dtype.newbyteorder("="))


def _array(name: str, tensor: Any, path: Path) -> Array:
    """Return an initialiser as an `Array`. Its data are checked now if they are external, and read when ``load`` is
    called."""
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
    """Return a tensor whose external data have an absolute path; `ModelError` unless the data are bytes of a file in
    the model's folder."""
    what = f"initialiser {name!r}: external data {str(tensor.location)!r}"
    location = Path(str(tensor.location))
    if location.is_absolute() or ".." in location.parts or not location.parts:
        raise ModelError(f"{what} is outside of the model's folder")
    target = Path(os.path.realpath(path.parent / location))
    # Also the target's folder, if the model's file is a symbolic link, as in download caches.
    folders = {Path(os.path.realpath(path.parent)), Path(os.path.realpath(path)).parent}
    if not any(target.is_relative_to(folder) for folder in folders):
        raise ModelError(f"{what} is outside of the model's folder")
    try:
        size = target.stat().st_size
    except OSError as error:
        raise ModelError(f"{what} cannot be read: {error.strerror}") from None
    if not target.is_file():
        raise ModelError(f"{what} is not a file")
    start, length = tensor.offset or 0, tensor.length
    needed = (math.prod(tensor.shape) * tensor.dtype.bitwidth + 7) // 8
    if start < 0 or start + needed > size or (length is not None and length != needed):
        raise ModelError(
            f"{what} has {size} bytes; {needed} from byte {start} on are needed (length stated: {length})"
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
