"""Undo what exporters do to weights: merge equal ones, and transpose tied ones, which unties them.

*Merged.* Torch's exporters keep one of several weights with equal values (TorchScript for inference: an Identity
named like the other weight; dynamo: one initialiser that several modules read). Trained as one, they would receive
each other's gradients. Two weights are really tied if they play different roles (an embedding and a head). They are
separated if all their values are the same number (initial scales and shifts), or if their names differ only in
layer numbers (layers made by copying). TorchScript exports in training form merge only tied weights.

*Transposed.* A linear layer's weight is stored transposed, as MatMul needs it; a group norm's scale is stored
reshaped, as Mul needs it. Where dynamo records the original weight, or where a TorchScript head is the transposed
table of an embedding, the weight gets its original name and shape, and the layer reads a view of it, so that a tie
with an embedding is kept.
"""

from __future__ import annotations

import math
import re
from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, replace

import numpy as np

from rematplan.ir.onnx import weight_roles as roles
from rematplan.ir.onnx.draft import Array, Draft, Edit, Origin, Scope
from rematplan.ir.onnx.folded_weights import gather_spread
from rematplan.ir.onnx.graph import Node
from rematplan.ir.onnx.weight_origins import GENERATED, Evidence

MAX_UNIFORM = 1 << 22  # larger weights are not checked for being a single repeated number
SAMPLE = 64  # rows and columns compared to recognise a transpose


def untangled(draft: Draft) -> tuple[Draft, tuple[str, ...]]:
    """Return a file's content with the weights that the exported module had, and notes for the user about what was
    changed.

    Weights that the exporter stored transposed or reshaped have their original shape again, weights that it merged
    because their values are equal are separate again, and tensors that repeat a weight are computed from the weight.

    ``draft.nodes`` must be in topological order.
    """
    edit = Edit(dict(draft.initialisers), dict(draft.origins), list(draft.nodes), dict(draft.scopes))
    restored = _restore_folded(edit, draft)
    separated = _part_aliases(edit) + _part_shared(edit)
    evidence = Evidence(replace(draft, nodes=tuple(edit.nodes)), roles.uses(edit.nodes))
    gathered = gather_spread(edit, evidence)
    said = (
        restored
        and f"{restored} weights are stored transposed or reshaped by the export and were turned back",
        separated
        and f"{separated} weights that the export merged because their values are equal are trained apart",
        gathered
        and f"{gathered} weights that the export spread over constant places are one weight a place again",
    )
    found = replace(draft, initialisers=edit.initialisers, origins=edit.origins, nodes=tuple(edit.nodes))
    return found, tuple(text for text in said if text)


# ------------------------------------------------------------------ transposed and reshaped


def _restore_folded(edit: Edit, draft: Draft) -> int:
    """Replace copies of a weight that layers read by views of the weight. Return the number of copies replaced."""
    tables = _tables(edit)
    found: dict[str, tuple[str, _View]] = {}
    for node in draft.nodes:
        scope = draft.scopes.get(node.name, Scope())
        for at, copy in enumerate(node.inputs):
            view = next((v for v in VIEWS if v.reader(node.op, at, scope.operator)), None)
            if view is None or node.domain or copy in found or not edit.float_weight(copy):
                continue
            name = _source(edit, view, edit.initialisers[copy], scope, tables)
            if name:
                found[copy] = (name, view)
    for copy, (name, view) in found.items():
        _view_back(edit, copy, name, view)
    return len(found)


@dataclass(frozen=True)
class _View:
    """How a layer's copy of a weight differs from the weight. ``shape``: computes the weight's shape from the
    copy's."""

    op: str
    reader: Callable[[str, int, str], bool]
    shape: Callable[[tuple[int, ...]], tuple[int, ...] | None]
    array: Callable[[np.ndarray], np.ndarray]


def _channels(shape: tuple[int, ...]) -> tuple[int, ...] | None:
    return shape[:1] if len(shape) > 1 and math.prod(shape[1:]) == 1 else None


TRANSPOSED = _View(
    "Transpose",
    lambda op, at, operator: op == "MatMul" and at == 1,
    lambda shape: shape[::-1] if len(shape) == 2 else None,
    lambda array: np.ascontiguousarray(array.T),
)
BROADCAST = _View(  # a group norm's scale and shift, shaped (channels, 1, 1)
    "Reshape",
    lambda op, at, operator: op in ("Mul", "Add") and at == 1 and operator.startswith("aten.group_norm"),
    _channels,
    lambda array: array.reshape(-1),
)
VIEWS = (TRANSPOSED, BROADCAST)


def _tables(edit: Edit) -> Mapping[tuple[int, ...], list[str]]:
    """Return the names of embedding tables, by shape."""
    found: dict[tuple[int, ...], list[str]] = defaultdict(list)
    for node in edit.nodes:
        if node.op == "Gather" and (array := edit.float_weight(node.inputs[0])) and len(array.shape) == 2:
            found[array.shape].append(array.name)
    return found


def _source(
    edit: Edit, view: _View, copy: Array, scope: Scope, tables: Mapping[tuple[int, ...], list[str]]
) -> str:
    """Return the name of the weight that an operand is a transposed or reshaped copy of, or ''."""
    shape = view.shape(copy.shape)
    if shape is None:
        return ""
    dotted = [s for s in edit.origins.get(copy.name, Origin()).folded_from if "." in s]
    if len(dotted) == 1 and (view is BROADCAST or scope.operator.startswith("aten.linear")):
        stated = edit.initialisers.get(dotted[0])
        if stated is None:
            return dotted[0] if dotted[0] not in edit.used else ""
        return dotted[0] if view is TRANSPOSED and _is_transposed(stated, copy) else ""
    if view is BROADCAST or not GENERATED.match(copy.name):
        return ""
    return next((t for t in tables.get(shape, ()) if _is_transposed(edit.initialisers[t], copy)), "")


def _is_transposed(stated: Array, copy: Array) -> bool:
    """Return whether a sample of one tensor equals the other's transpose (random values are never equal by chance)."""
    if stated.shape != copy.shape[::-1] or stated.dtype != copy.dtype or 0 in stated.shape:
        return False
    a, b = stated.load(), copy.load()
    rows, columns = (np.unique(np.linspace(0, n - 1, min(SAMPLE, n)).astype(int)) for n in a.shape)
    mine = np.asarray(a[np.ix_(rows, columns)])
    return bool(np.array_equal(mine, b[np.ix_(columns, rows)].T) and (mine != mine.flat[0]).any())


def _view_back(edit: Edit, copy: str, name: str, view: _View) -> None:
    stored = edit.initialisers.pop(copy)
    if name not in edit.initialisers:
        edit.used.add(name)
        shape = view.shape(stored.shape) or stored.shape
        edit.initialisers[name] = Array(name, stored.dtype, shape, lambda: view.array(stored.load()))
        edit.origins[name] = Origin("PARAMETER")
    readers: dict[str, list[int]] = defaultdict(list)  # by module, because each gets its own view
    for at, node in enumerate(edit.nodes):
        if copy in node.inputs:
            readers[edit.scopes.get(node.name, Scope()).module].append(at)
    views = {}
    for module, places in readers.items():
        views[places[0]] = node = _view_node(edit, name, stored.shape, view, edit.nodes[places[0]].version)
        edit.scopes[node.name] = Scope(module)
        for at in places:
            edit.nodes[at] = _renamed(edit.nodes[at], {copy: node.outputs[0]})
    edit.nodes[:] = [n for at, node in enumerate(edit.nodes) for n in (views.get(at), node) if n is not None]


def _view_node(edit: Edit, name: str, shape: tuple[int, ...], view: _View, version: int) -> Node:
    seen = edit.fresh(f"{name}.{view.op}")
    if view is TRANSPOSED:
        return Node(seen, "Transpose", "", version, (name,), (seen,), {"perm": (1, 0)})
    stated = edit.fresh(f"{seen}.shape")
    edit.initialisers[stated] = Array.of(stated, np.asarray(shape, np.int64))
    return Node(seen, "Reshape", "", version, (name, stated), (seen,))


def _renamed(node: Node, names: Mapping[str, str]) -> Node:
    if not any(i in names for i in node.inputs):
        return node
    return replace(node, inputs=tuple(names.get(i, i) for i in node.inputs))


# ------------------------------------------------------------------ merged


def _part_aliases(edit: Edit) -> int:
    """Give each Identity of a merged weight a separate weight. Return the number of new weights."""
    if any(_trains(node) for node in edit.nodes):
        return 0
    kept, separated = [], 0
    for node in edit.nodes:
        array = edit.float_weight(node.inputs[0]) if node.op == "Identity" and not node.domain else None
        if array is None or not _merged(array, node.outputs[0]):
            kept.append(node)
            continue
        edit.initialisers[node.outputs[0]] = replace(array, name=node.outputs[0])
        separated += 1
    edit.nodes[:] = kept
    return separated


def _trains(node: Node) -> bool:
    """Return whether the node is a batch norm in training form."""
    return node.op == "BatchNormalization" and roles.trains_statistics(node)


def _merged(array: Array, other: str) -> bool:
    """Return whether two weights with equal values, ``array`` and one named ``other``, are equal only by
    coincidence, so that they must be separated."""
    return _is_uniform(array) or (array.name != other and _layer(array.name) == _layer(other))


def _layer(name: str) -> str:
    """Return a name with its layer numbers replaced."""
    return re.sub(r"\d+", "#", name)


def _is_uniform(array: Array) -> bool:
    if not 1 < math.prod(array.shape) <= MAX_UNIFORM:
        return False
    values = array.load().ravel()
    return bool((values == values[0]).all())


def _part_shared(edit: Edit) -> int:
    """Give each module that reads another module's merged weight a separate weight. Return the number of new
    weights."""
    modules: dict[str, dict[str, list[int]]] = defaultdict(lambda: defaultdict(list))
    for at, node in enumerate(edit.nodes):
        for name in dict.fromkeys(node.inputs):
            if node.name in edit.scopes and edit.float_weight(name):
                modules[name][edit.scopes[node.name].module].append(at)
    separated = 0
    for name, readers in modules.items():
        home = max((m for m in readers if m and name.startswith(f"{m}.")), key=len, default="")
        wanted = {m: m + name[len(home) :] for m in readers if m and not name.startswith(f"{m}.")}
        if not home or not wanted or not _may_part(edit, name, wanted.values()):
            continue
        for module, own in wanted.items():
            _own_weight(edit, name, own, readers[module])
        separated += len(wanted)
    return separated


def _may_part(edit: Edit, name: str, others: Iterable[str]) -> bool:
    return all(_layer(name) == _layer(other) for other in others) or _is_uniform(edit.initialisers[name])


def _own_weight(edit: Edit, name: str, wanted: str, readers: Iterable[int]) -> None:
    own = edit.fresh(wanted)
    edit.initialisers[own] = replace(edit.initialisers[name], name=own)
    if name in edit.origins:
        edit.origins[own] = edit.origins[name]
    for at in readers:
        edit.nodes[at] = _renamed(edit.nodes[at], {name: own})
