"""Undo what ONNX exporters do to weights: they merge equal ones, and transpose or reshape others, which
unties tied ones.

Merged weights are separated where nodes record what they read. Without records they are if all their values are
one number, or their names differ only in layer numbers; other equal ones count as tied. A stored transpose gets
the original weight if its name is recorded, or another matrix of the file is equal.
"""

from __future__ import annotations

import math
import re
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, replace

import numpy as np

from rematplan.ir.onnx import weight_roles as roles
from rematplan.ir.onnx.draft import Array, Draft, Edit, Origin, Scope
from rematplan.ir.onnx.folded_weights import restore_repeated_weights
from rematplan.ir.onnx.graph import Node
from rematplan.ir.onnx.weight_notes import named
from rematplan.ir.onnx.weights_or_buffers import GENERATED, Evidence

MAX_UNIFORM = 1 << 22  # larger weights are not checked for being a single repeated number
SAMPLE = 64  # rows and columns compared to recognise a transpose


def untangled(draft: Draft) -> tuple[Draft, tuple[str, ...]]:
    """Return the content with the weights that the exported module had, and notes. ``draft``: nodes in
    topological order.
    """
    edit = Edit(dict(draft.initialisers), dict(draft.origins), list(draft.nodes), dict(draft.scopes))
    restored = _restore_folded(edit, draft)
    separated = _separate_aliases(edit) + _separate_recorded(edit) + _separate_shared(edit)
    _separate_statistics(edit)
    evidence = Evidence(replace(draft, nodes=tuple(edit.nodes)), roles.uses(edit.nodes))
    gathered = restore_repeated_weights(edit, evidence)
    lost = _lost(edit)
    said = (
        restored
        and f"{restored} weights that the export had transposed or reshaped have the module's layout again",
        separated
        and f"{separated} weights that the export had merged because their values are equal are separate again",
        gathered
        and f"{gathered} weights that the export had repeated in larger constants are single weights again",
        lost
        and f"{len(lost)} parameters of the module are not in the file ({named(lost)}): the export dropped them "
        "(biases of zeros), merged them with equal ones, or folded them into others (batch norms: see --bn train)",
    )
    found = replace(draft, initialisers=edit.initialisers, origins=edit.origins, nodes=tuple(edit.nodes))
    return found, tuple(text for text in said if text)


# ------------------------------------------------------------------ transposed and reshaped


def _restore_folded(edit: Edit, draft: Draft) -> int:
    """Restore weights that were stored transposed or reshaped, in place. Return how many. Their layers read a
    view of them.
    """
    matrices = _named_matrices(edit)
    found: dict[str, tuple[str, _View]] = {}
    for node in draft.nodes:
        scope = draft.scopes.get(node.name, Scope())
        for at, copy in enumerate(node.inputs):
            view = next((v for v in VIEWS if v.reader(node.op, at, scope.operator)), None)
            if view is None or node.domain or copy in found or not edit.float_weight(copy):
                continue
            name = _source(edit, view, edit.initialisers[copy], scope, matrices)
            if name:
                found[copy] = (name, view)
    for copy, (name, view) in found.items():
        _restore_weight(edit, copy, name, view)
    return len(found)


@dataclass(frozen=True)
class _View:
    """A form in which exporters store a weight for a layer: transposed or reshaped."""

    op: str
    """The ONNX op that computes the stored form."""
    reader: Callable[[str, int, str], bool]
    """Takes a node's op, an input's position and torch's operator; returns whether the input may have this form."""
    shape: Callable[[tuple[int, ...]], tuple[int, ...] | None]
    """Takes the stored shape, and returns the weight's shape; None if the stored shape excludes this form."""
    array: Callable[[np.ndarray], np.ndarray]
    """Takes the stored values, and returns the weight's values."""


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


def _named_matrices(edit: Edit) -> Mapping[tuple[int, ...], list[str]]:
    """Return the names of matrices that have a name of the module's, by the matrix's shape."""
    found: dict[tuple[int, ...], list[str]] = defaultdict(list)
    for name in edit.initialisers:
        array = edit.float_weight(name)
        if array is not None and len(array.shape) == 2 and not GENERATED.match(name):
            found[array.shape].append(name)
    return found


def _source(
    edit: Edit, view: _View, copy: Array, scope: Scope, matrices: Mapping[tuple[int, ...], list[str]]
) -> str:
    """Return the original name of the weight that ``copy`` stores transposed or reshaped: the recorded one, or an
    equal matrix's; '' if unknown. ``scope``: of the node that reads it."""
    shape = view.shape(copy.shape)
    if shape is None:
        return ""
    dotted = [s for s in edit.origins.get(copy.name, Origin()).folded_from if "." in s]
    if len(dotted) == 1:
        stated = edit.initialisers.get(dotted[0])
        if stated is not None:
            return dotted[0] if view is TRANSPOSED and _is_transposed(stated, copy) else ""
        if view is BROADCAST or scope.operator.startswith("aten.linear"):
            return dotted[0] if dotted[0] not in edit.used else ""
    if view is BROADCAST or not GENERATED.match(copy.name):
        return ""
    return next((m for m in matrices.get(shape, ()) if _is_transposed(edit.initialisers[m], copy)), "")


def _is_transposed(stated: Array, copy: Array) -> bool:
    """Return whether a sample of ``copy`` is the transpose of ``stated``, and not one repeated number."""
    if stated.shape != copy.shape[::-1] or stated.dtype != copy.dtype or 0 in stated.shape:
        return False
    a, b = stated.load(), copy.load()
    # A sample suffices: random values are not equal by chance.
    rows, columns = (np.unique(np.linspace(0, n - 1, min(SAMPLE, n)).astype(int)) for n in a.shape)
    mine = np.asarray(a[np.ix_(rows, columns)])
    return bool(np.array_equal(mine, b[np.ix_(columns, rows)].T) and (mine != mine.flat[0]).any())


def _restore_weight(edit: Edit, copy: str, name: str, view: _View) -> None:
    """Replace the stored form ``copy`` by the weight ``name``, of which each module that reads it gets a view of its
    own."""
    stored = edit.initialisers.pop(copy)
    if name not in edit.initialisers:
        edit.used.add(name)
        shape = view.shape(stored.shape) or stored.shape
        edit.initialisers[name] = Array(name, stored.dtype, shape, lambda: view.array(stored.load()))
        edit.origins[name] = Origin("PARAMETER")
    readers: dict[str, list[int]] = defaultdict(list)  # by module: each module gets a separate view
    for at, node in enumerate(edit.nodes):
        if copy in node.inputs:
            readers[edit.scopes.get(node.name, Scope()).module].append(at)
    views = {}
    for module, places in readers.items():
        first = edit.nodes[places[0]]
        views[places[0]] = node = _view_node(edit, name, stored.shape, view, first.version)
        edit.scopes[node.name] = Scope(module, reads=_reads(edit, first))
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


def _separate_aliases(edit: Edit) -> int:
    """Replace each Identity that TorchScript wrote for merged weights by a weight of its own. Return how many; 0 if a
    batch norm is in training form."""
    # In training form TorchScript merges tied weights alone.
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
    """Return whether the node is a batch norm that normalises by the batch and updates its running statistics."""
    return node.op == "BatchNormalization" and roles.trains_statistics(node)


def _merged(array: Array, other: str) -> bool:
    """Return whether an exporter merged ``other`` into ``array`` because initial values are equal, not
    because they are tied.
    """
    return _is_uniform(array) or (array.name != other and _layer(array.name) == _layer(other))


def _layer(name: str) -> str:
    """Return a weight's name with each number replaced by ``#``, to compare names of different layers."""
    return re.sub(r"\d+", "#", name)


def _is_uniform(array: Array) -> bool:
    if not 1 < math.prod(array.shape) <= MAX_UNIFORM:
        return False
    values = array.load().ravel()
    return bool((values == values[0]).all())


def _reads(edit: Edit, node: Node) -> tuple[str, ...]:
    return edit.scopes.get(node.name, Scope()).reads


def _absent(edit: Edit) -> frozenset[str]:
    """Return the names of the module's tensors that are no initialisers, and from which none was computed."""
    folded = {source for origin in edit.origins.values() for source in origin.folded_from}
    return frozenset(n for n, o in edit.origins.items() if o.kind and n not in edit.initialisers) - folded


def _lost(edit: Edit) -> list[str]:
    """Return the names of parameters that nodes record to read, and that are not in the file."""
    absent, read = _absent(edit), dict.fromkeys(r for node in edit.nodes for r in _reads(edit, node))
    return [name for name in read if name in absent and edit.origins[name].kind == "PARAMETER"]


def _separate_recorded(edit: Edit) -> int:
    """Give tensors of the module that the exporter merged into others initialisers of their own, where a node records
    that it reads them. Return how many."""
    absent, made = _absent(edit), dict[str, str]()
    for i, node in enumerate(edit.nodes):
        reads = _reads(edit, node)
        # The node's inputs that are tensors of the module, in order as the operator reads them.
        places = [at for at, name in enumerate(node.inputs) if _is_recorded(edit, name)]
        if len(places) != len(reads):
            places = [at for at in places if node.inputs[at] not in reads]
            reads = tuple(name for name in reads if name in absent)
        inputs = list(node.inputs)
        for at, own in zip(places, reads, strict=True) if len(places) == len(reads) else ():
            if own not in absent:
                continue
            if own not in made:
                made[own] = edit.fresh(own)
                edit.initialisers[made[own]] = replace(edit.initialisers[inputs[at]], name=made[own])
                edit.origins[made[own]] = edit.origins[own]
            inputs[at] = made[own]
        edit.nodes[i] = replace(node, inputs=tuple(inputs))
    return len(made)


def _is_recorded(edit: Edit, name: str) -> bool:
    """Return whether a value is a floating-point tensor of the module, by the file's records."""
    return bool(edit.float_weight(name) and edit.origins.get(name, Origin()).kind)


def _separate_statistics(edit: Edit) -> None:
    """Give each batch norm in inference form statistics that nothing else reads."""
    readers = Counter(name for node in edit.nodes for name in node.inputs)
    for i, node in enumerate(edit.nodes):
        if node.op != "BatchNormalization" or node.domain or roles.trains_statistics(node):
            continue
        inputs = list(node.inputs)
        for at in sorted(roles.STATISTICS):
            name = inputs[at]
            if readers[name] > 1 and edit.float_weight(name):
                inputs[at] = edit.fresh(f"{node.name}.{('running_mean', 'running_var')[at - 3]}")
                edit.initialisers[inputs[at]] = replace(edit.initialisers[name], name=inputs[at])
        edit.nodes[i] = replace(node, inputs=tuple(inputs))


def _modules(edit: Edit) -> Mapping[str, str]:
    """Return the module of each node by the node's name; a node that records none has that of a node that reads its
    result."""
    found: dict[str, str] = {}
    reader: dict[str, str] = {}
    for node in reversed(edit.nodes):
        scope = edit.scopes.get(node.name)
        module = scope.module if scope else next((reader[o] for o in node.outputs if o in reader), None)
        if module is not None:
            found[node.name] = module
            reader.update(dict.fromkeys(node.inputs, module))
    return found


def _separate_shared(edit: Edit) -> int:
    """Give modules weights of their own if the exporter merged them into one initialiser, judged by names and values
    (`_may_separate`), where no record says that they share it. Return how many."""
    modules: dict[str, dict[str, list[int]]] = defaultdict(lambda: defaultdict(list))
    module_of = _modules(edit)
    for at, node in enumerate(edit.nodes):
        for name in dict.fromkeys(node.inputs):
            if node.name in module_of and edit.float_weight(name):
                modules[name][module_of[node.name]].append(at)
    separated = 0
    for name, readers in modules.items():
        # The initialiser's name says to which module it belongs, unless the exporter computed it.
        home = max((m for m in readers if m and name.startswith(f"{m}.")), key=len, default="")
        wanted = {m: m + name[len(home) :] for m in readers if m and not name.startswith(f"{m}.")}
        if not home:
            sources = edit.origins.get(name, Origin()).folded_from
            computed = any(edit.origins.get(s, Origin()).kind == "PARAMETER" for s in sources)
            wanted = {m: f"{m}.{name}" for m in [*readers][1:]} if computed else {}
        if not wanted or not _may_separate(edit, name, wanted.values()):
            continue
        for module, own in wanted.items():
            merged = [at for at in readers[module] if name not in _reads(edit, edit.nodes[at])]
            if merged:
                _own_weight(edit, name, own, merged)
                separated += 1
    return separated


def _may_separate(edit: Edit, name: str, others: Iterable[str]) -> bool:
    return all(_layer(name) == _layer(other) for other in others) or _is_uniform(edit.initialisers[name])


def _own_weight(edit: Edit, name: str, wanted: str, readers: Iterable[int]) -> None:
    own = edit.fresh(wanted)
    edit.initialisers[own] = replace(edit.initialisers[name], name=own)
    if name in edit.origins:
        edit.origins[own] = edit.origins[name]
    for at in readers:
        edit.nodes[at] = _renamed(edit.nodes[at], {name: own})
