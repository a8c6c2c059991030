"""Load an ONNX file as a :class:`rematplan.ir.onnx.graph.Graph`; `_graph` has the steps in order."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

from rematplan.ir.errors import ModelError
from rematplan.ir.onnx import weight_roles as roles
from rematplan.ir.onnx.batch_dimension import with_batch
from rematplan.ir.onnx.bound_dimensions import MOST_ELEMENTS, bound_inputs, known_shape
from rematplan.ir.onnx.constant_folding import MAX_ELEMENTS, constant_value, fold
from rematplan.ir.onnx.control_flow import captured, without_subgraphs
from rematplan.ir.onnx.draft import Array, Draft
from rematplan.ir.onnx.fake_quantisation import with_fake_quantisation
from rematplan.ir.onnx.graph import Graph, Node, Role, Value, Weight
from rematplan.ir.onnx.protobuf import read_file, read_proto
from rematplan.ir.onnx.restored_weights import untangled
from rematplan.ir.onnx.training_form import Forms, in_form
from rematplan.ir.onnx.weight_notes import weight_notes
from rematplan.ir.onnx.weights_or_buffers import Evidence
from rematplan.ir.training_graph import topological_order

AS_IS = Forms()
COUNTERS = "num_batches_tracked"  # part of the name of a step counter of torch's batch norm


def load_onnx(path: Path | str, dims: Mapping[str, int] | None = None, forms: Forms = AS_IS) -> Graph:
    """Load the forward graph of an ONNX file.

    ``dims``: sizes of symbolic dimensions of inputs, by name or as ``input.axis``. ``forms``: of batch norms and
    dropouts.

    Raises:
        ModelError: the file cannot be read, or has something that is not supported.
        UsageError: ``dims`` names no dimension of an input, or has a size that is no positive integer.
    """
    path = Path(path)
    return _loaded(read_proto(read_file(path), path), path, dims, forms)


def graph_from_proto(proto: Any, dims: Mapping[str, int] | None = None) -> Graph:
    """Load the forward graph of an ONNX model in memory; `ModelError` if that is impossible, as in `load_onnx`."""
    path = Path("the model")
    return _loaded(read_proto(proto, path), path, dims, AS_IS)


def _loaded(draft: Draft, path: Path, dims: Mapping[str, int] | None, forms: Forms) -> Graph:
    try:
        return _graph(draft, dict(dims or {}), forms)
    except ModelError as error:
        raise ModelError(f"{path}: {error}") from None


def _graph(draft: Draft, dims: Mapping[str, int], forms: Forms) -> Graph:
    """Return the graph of a file in the stated form, with the given sizes, without control flow and dead nodes."""
    declared, dims, batch = with_batch(draft.inputs, dims)
    inputs, bound = bound_inputs(declared, dims)
    draft, unrolled = without_subgraphs(replace(draft, nodes=_sorted(draft)), inputs, bound)
    draft, untied = untangled(draft)
    draft, formed = in_form(draft, forms)
    nodes, outputs = _without_aliases(draft.nodes, draft)
    nodes = _live(nodes, outputs)
    work = _Work(draft.initialisers, roles.uses(nodes))
    nodes, joined = with_fake_quantisation(_live(work.fold(nodes), outputs), work.source)
    nodes = _live(nodes, outputs)
    weights = _weights(work, draft, nodes, outputs)
    return Graph(
        name=draft.name,
        inputs=inputs,
        outputs=tuple(
            Value(o, d.dtype, known_shape(d, bound)) for o, d in zip(outputs, draft.outputs, strict=True)
        ),
        weights=weights,
        nodes=_silenced(nodes, outputs),
        notes=(*unrolled, *untied, *formed, *joined, *_notes(draft, weights, nodes)),
        batch=batch,
    )


# ------------------------------------------------------------------ order, aliases, liveness


def _sorted(draft: Draft) -> tuple[Node, ...]:
    """Return the nodes in topological order: of those that can run next, the first in the file; ModelError
    for a cycle.
    """
    writer = {name: i for i, node in enumerate(draft.nodes) for name in node.outputs if name}
    # What a node's subgraphs read counts as read by the node.
    reads = [(*roles.reads(n), *captured(n.name, draft.bodies)) for n in draft.nodes]
    order = topological_order([{writer[n] for n in names if n in writer} for names in reads])
    if len(order) < len(draft.nodes):
        stuck = draft.nodes[min({*range(len(draft.nodes))}.difference(order))]
        raise ModelError(f"the graph has a cycle, in or before node {stuck.name!r} ({stuck.op})")
    return tuple(draft.nodes[i] for i in order)


def _without_aliases(nodes: Sequence[Node], draft: Draft) -> tuple[tuple[Node, ...], tuple[str, ...]]:
    """Return the nodes without Identity nodes, so that weights they tied are one weight, and the outputs' names.
    Identity nodes that write graph outputs stay."""
    outputs = tuple(d.name for d in draft.outputs)
    alias: dict[str, str] = {}
    kept = []
    for node in nodes:
        inputs = tuple(alias.get(n, n) for n in node.inputs)
        if node.op == "Identity" and not node.domain and node.inputs and node.outputs:
            alias[node.outputs[0]] = inputs[0]
            if node.outputs[0] not in outputs:
                continue
        kept.append(replace(node, inputs=inputs))
    return tuple(kept), outputs


def _live(nodes: Sequence[Node], outputs: Iterable[str]) -> tuple[Node, ...]:
    """Return the nodes that some value of ``outputs`` depends on. ``nodes``: in topological order."""
    needed = set(outputs)
    kept = []
    for node in reversed(nodes):
        if any(o in needed for o in node.outputs):
            kept.append(node)
            needed.update(roles.reads(node))
    return tuple(reversed(kept))


def _silenced(nodes: Sequence[Node], outputs: Iterable[str]) -> tuple[Node, ...]:
    """Rename values that neither a node nor ``outputs`` reads to ``""``, which means absent in ONNX."""
    read = {name for node in nodes for name in roles.reads(node)} | set(outputs)
    return tuple(replace(n, outputs=tuple(o if o in read else "" for o in n.outputs)) for n in nodes)


# ------------------------------------------------------------------ constants and weights


@dataclass
class _Work:
    """The tensors of a graph with known values, by name, while constants are folded."""

    initialisers: Mapping[str, Array]
    """Tensors stored in the file."""
    used: roles.Uses
    """The readers of each value."""
    constants: dict[str, Array] = field(default_factory=dict)
    """Results of folded nodes."""
    generated: dict[str, Array] = field(default_factory=dict)
    """Weights that a node fills with one value."""

    def fold(self, nodes: Sequence[Node]) -> tuple[Node, ...]:
        """Compute the nodes of known constants into ``constants``, and return the others. ``nodes``: in
        topological order.
        """
        # Floating-point initialisers may be trained, so they are not known.
        known = {
            name: array.load()
            for name, array in self.initialisers.items()
            if _foldable(array) and name in self.used.readers
        }
        left = []
        for node in nodes:
            if self._take_generated(node, known):
                continue
            results = _constant(node) or fold(node, known)
            if results is None:
                left.append(node)
                continue
            for name, array in zip(node.outputs, results, strict=False):
                self.constants[name] = Array.of(name, array)
                if math.prod(array.shape) <= MAX_ELEMENTS:
                    known[name] = array
        return tuple(left)

    def _take_generated(self, node: Node, known: Mapping[str, np.ndarray]) -> bool:
        """Record the result of a ``ConstantOfShape`` node in ``generated`` if it is used as a weight, and return
        whether it is. `ModelError` if its shape is invalid."""
        if node.op != "ConstantOfShape" or node.domain or node.inputs[0] not in known:
            return False
        fill = np.asarray(node.attributes.get("value", np.zeros(1, np.float32))).ravel()
        shape = tuple(int(d) for d in known[node.inputs[0]].ravel())
        dtype, name = fill.dtype.name, node.outputs[0]
        if math.prod(shape) > MOST_ELEMENTS:
            raise ModelError(
                f"node {node.name!r} (ConstantOfShape): shape {shape} has more than {MOST_ELEMENTS} numbers"
            )
        if fill.size != 1 or any(d < 0 for d in shape):
            raise ModelError(
                f"node {node.name!r} (ConstantOfShape): shape {shape} with {fill.size} values; sizes must be 0 or "
                f"more, with one value"
            )
        if (
            not shape
            or dtype not in roles.FLOATS
            or not roles.is_generated_weight(name, float(fill[0]), self.used)
        ):
            return False
        self.generated[name] = Array(name, dtype, shape, partial(np.full, shape, fill[0]))
        return True

    def source(self, name: str) -> Array | None:
        """Return the stored, folded or generated tensor ``name``; None if its value is not known."""
        return self.initialisers.get(name) or self.constants.get(name) or self.generated.get(name)


def _foldable(array: Array) -> bool:
    return (
        array.dtype not in roles.FLOATS
        and COUNTERS not in array.name
        and math.prod(array.shape) <= MAX_ELEMENTS
    )


def _constant(node: Node) -> tuple[np.ndarray] | None:
    """Return the value of a Constant node, None for another node; `ModelError` for a form of Constant that is not
    supported."""
    if node.op != "Constant" or node.domain:
        return None
    value = constant_value(node)
    if value is None:
        raise ModelError(
            f"node {node.name!r}: this form of Constant is not supported ({', '.join(node.attributes)})"
        )
    return (value,)


def _weights(work: _Work, draft: Draft, nodes: Sequence[Node], outputs: Sequence[str]) -> tuple[Weight, ...]:
    """Return each known tensor that is still read, with its role: stored ones, then generated, then folded. If none
    is a parameter, constants that layers read as weights are."""
    used = roles.uses(nodes)
    trained = roles.differentiable_values(nodes, outputs)
    read = used.readers.keys() | set(outputs)
    evidence = Evidence(draft, used)
    found = []
    for name in (*work.initialisers, *work.generated, *work.constants):
        array = work.source(name)
        if array is None or name not in read:
            continue
        role: Role = "constant"
        if roles.is_statistic(name, used) or COUNTERS in name:
            role = "buffer"
        elif (
            name not in work.constants
            and array.dtype in roles.FLOATS
            and name in trained
            and (name in work.generated or evidence.is_weight(array))
        ):
            role = "parameter"
        found.append(
            Weight(name, array.dtype, array.shape, role, array.load, generated=name in work.generated)
        )
    # Some files store their weights in Constant nodes.
    if any(w.role == "parameter" for w in found):
        return tuple(found)
    return tuple(_promoted(w, used) for w in found)


def _promoted(weight: Weight, used: roles.Uses) -> Weight:
    """Return a constant as a ``parameter`` if it is a floating-point array, no single number, that a layer reads in an
    input for weights; else unchanged."""
    layer = weight.role == "constant" and weight.dtype in roles.FLOATS and weight.shape
    return replace(weight, role="parameter") if layer and roles.in_weight_input(weight.name, used) else weight


# ------------------------------------------------------------------ what a person should know


def _notes(draft: Draft, weights: Sequence[Weight], nodes: Sequence[Node]) -> tuple[str, ...]:
    """Return what a person should know about a file: signs of an inference export, and weights that are not what they
    seem."""
    kinds = Counter(n.op for n in nodes)
    biased = sum(1 for n in nodes if n.op == "Conv" and len(n.inputs) > 2 and n.inputs[2])
    frozen = sum(1 for n in nodes if n.op == "BatchNormalization" and not roles.trains_statistics(n))
    generated = sum(1 for w in weights if w.generated)
    read = {w.name for w in weights}
    unused = sum(1 for a in draft.initialisers.values() if a.dtype in roles.FLOATS and a.name not in read)
    used = roles.uses(nodes)
    rounded = sum(1 for w in weights if w.role == "constant" and w.shape and roles.is_rounded(w.name, used))
    promoted = [
        w for w in weights if w.role == "parameter" and w.name not in draft.initialisers and not w.generated
    ]
    said = (
        (biased > 1 and not kinds["BatchNormalization"])
        and f"looks like a folded inference export: {biased} Conv have a bias and no batch norm is left "
        "(export in training form, or see --bn train)",
        frozen
        and f"{frozen} of {kinds['BatchNormalization']} batch norms are in inference form and stay fixed",
        generated and f"{generated} weights have no values in the file and start random",
        promoted and f"{len(promoted)} weights are stored in Constant nodes and are trained all the same",
        rounded
        and f"{rounded} weights are not trained, because rounding them to integers has no gradient: they are stored as "
        "integers, or no DequantizeLinear of the same scale reads what a QuantizeLinear makes of them",
        unused and f"{unused} float initialisers are read by nothing that an output needs and are dropped",
    )
    reached = roles.differentiable_values(nodes, [d.name for d in draft.outputs])
    return (*(text for text in said if text), *weight_notes(draft, weights, reached))
