"""Restore weights that an exporter folded with constants into a larger tensor that repeats their elements.

Examples: a class token repeated over the batch, an embedding looked up at constant positions, a table of relative
positions with a mask added. Constant folding leaves one large tensor in which each of the weight's elements occurs
many times. If it were trained as it is, the copies would diverge. Here the copies become one weight again, followed
by nodes that repeat it; their result is bit-equal to the file's tensor. Equal values count as copies of one
element. If all values of a tensor are equal (a table that starts at zero), copies cannot be told apart, and only an
expand is undone.
"""

from __future__ import annotations

import math
import re
from dataclasses import dataclass

import numpy as np

from rematplan.ir.onnx import weight_roles as roles
from rematplan.ir.onnx.draft import Array, Edit, Origin
from rematplan.ir.onnx.graph import Attribute, Node
from rematplan.ir.onnx.weight_origins import BUFFER, GENERATED, LARGE, Evidence

MAX_ELEMENTS = 1 << 22  # larger tensors are not analysed
FORBIDDING = -50.0  # a mask adds at most this to forbidden scores
EXPANDED = re.compile(r"expand(_\d+)?$")  # dynamo's name for the result of an expand


@dataclass(frozen=True)
class Spread:
    """How a tensor, in which elements repeat, is computed from a smaller weight.

    ``weight``: the weight. ``shape``: the tensor's. ``rows``: for each position of the tensor without its axis
    ``axis``, the row of ``weight`` that is there along that axis; None: ``weight`` is broadcast to ``shape``.
    ``mask``: what is added afterwards, or None.
    """

    weight: np.ndarray
    shape: tuple[int, ...]
    rows: np.ndarray | None = None
    axis: int = 0
    mask: np.ndarray | None = None


def gather_spread(edit: Edit, evidence: Evidence) -> int:
    """Replace each initialiser that repeats the elements of a weight by that weight and nodes that repeat it. Return
    the number of initialisers replaced.

    ``edit``: changed in place. ``evidence``: decides which initialisers come from weights.
    """
    made: dict[str, list[Node]] = {}
    for name in tuple(edit.initialisers):
        array = edit.float_weight(name)
        readers = evidence.used.readers.get(name)
        if array is None or not readers or not _looks_spread(array, evidence):
            continue
        version = readers[0][0].version
        whole = _repeated(edit, array)
        spread = None if whole else spread_of(array.load(), bool(EXPANDED.match(name)))
        if whole:
            del edit.initialisers[name]
            chain = _Chain(edit, name, version, whole)
            chain.add("Expand", np.asarray(array.shape, np.int64))
            made[name] = chain.named(name)
        elif spread is not None:
            made[name] = _nodes(edit, array, spread, version)
    waiting = dict(made)
    nodes: list[Node] = []
    for node in edit.nodes:
        for name in node.inputs:
            nodes.extend(waiting.pop(name, ()))
        nodes.append(node)
    edit.nodes[:] = nodes
    return len(made)


def _looks_spread(array: Array, evidence: Evidence) -> bool:
    """Return whether the exporter computed the tensor from weights, and it is not just a layer's weight in another
    layout."""
    if len(array.shape) < 2 or not 1 < math.prod(array.shape) <= MAX_ELEMENTS:
        return False
    made = evidence.origins.get(array.name, Origin()).folded_from or GENERATED.match(array.name)
    return bool(made) and not roles.in_weight_input(array.name, evidence.used) and evidence.is_weight(array)


def _repeated(edit: Edit, array: Array) -> str:
    """Return the name of the weight of which the tensor consists of copies only, or ''. (A linear layer of a zero
    state leaves its bias.)"""
    for name in edit.origins.get(array.name, Origin()).folded_from:
        weight = edit.float_weight(name)
        if weight is None or edit.origins.get(name, Origin()).kind != "PARAMETER":
            continue
        at = len(array.shape) - len(weight.shape)
        if at >= 0 and weight.dtype == array.dtype and array.shape[at:] == weight.shape:
            values = array.load()
            if np.array_equal(np.broadcast_to(weight.load(), values.shape), values):
                return name
    return ""


# ------------------------------------------------------------------ what the values say


def spread_of(values: np.ndarray, expanded: bool = False) -> Spread | None:
    """Return how a tensor is computed from a smaller weight that it repeats; None if its values do not show that.

    ``values``: the tensor. ``expanded``: whether its first axis is known to repeat the weight; it decides if all
    values are equal.
    """
    wide = values.astype(np.float64)
    base, mask = _without_mask(values, wide)
    repeated = [n > 1 and bool((base == base.take([0], at)).all()) for at, n in enumerate(base.shape)]
    if all(repeated) or base.size == 1 or (base == base.flat[0]).all():
        repeated = [expanded and at == 0 for at in range(base.ndim)]
    small = base[tuple(slice(1) if r else slice(None) for r in repeated)]
    rows = _rows(small) if small.size > 1 and not (small == small.flat[0]).all() else None
    if rows is not None:
        table, places, axis = rows
        places = np.broadcast_to(places, values.shape[:axis] + values.shape[axis + 1 :])
        return Spread(table, values.shape, np.ascontiguousarray(places), axis, mask)
    if mask is None and small.shape == values.shape:
        return None
    return Spread(small, values.shape, mask=mask)


def _without_mask(values: np.ndarray, wide: np.ndarray) -> tuple[np.ndarray, np.ndarray | None]:
    """Return the tensor before a mask was added, and the mask, if they can be told apart."""
    large = np.abs(wide) >= LARGE
    zero = np.zeros_like(values)
    if large.any():
        if large.all():
            return values, None
        return np.where(large, zero, values), np.where(large, values, zero)
    base = values.max(0, keepdims=True)
    below = np.rint(wide - base.astype(np.float64)).astype(values.dtype)
    told_apart = (below < FORBIDDING).any() and ((below == 0) | (below < FORBIDDING)).all()
    if told_apart and np.array_equal((base + below).astype(values.dtype), values):
        return base, below
    return values, None


def _rows(values: np.ndarray) -> tuple[np.ndarray, np.ndarray, int] | None:
    """Return the tensor as rows of a table, along the axis that makes the table smallest: table, positions, axis."""
    best = None
    for axis, length in enumerate(values.shape):
        flat = np.moveaxis(values, axis, -1).reshape(-1, length)
        table, first, places = np.unique(flat, axis=0, return_index=True, return_inverse=True)
        smaller = best is None or (table.size, len(table)) < (best[0].size, len(best[0]))
        if len(table) < len(flat) and smaller:
            order = np.argsort(first)  # in the order of their first positions
            rank = np.empty_like(order)
            rank[order] = np.arange(len(order))
            shape = values.shape[:axis] + values.shape[axis + 1 :]
            best = table[order], rank[places.reshape(-1)].reshape(shape), axis
    return best


# ------------------------------------------------------------------ as nodes


def _nodes(edit: Edit, array: Array, spread: Spread, version: int) -> list[Node]:
    """Return the nodes that compute the tensor. The weight gets its original name if it has the module's shape."""
    del edit.initialisers[array.name]
    folded_from = edit.origins.get(array.name, Origin()).folded_from
    sources = [s for s in folded_from if "." in s and not BUFFER.match(s.rpartition(".")[2])]
    whole = EXPANDED.match(array.name) and len(sources) == 1
    name = edit.fresh(sources[0] if whole else f"{array.name}.weight")
    _store(edit, name, spread.weight.astype(array.dtype) if array.dtype != "bfloat16" else spread.weight)
    edit.origins[name] = Origin("PARAMETER")
    chain = _Chain(edit, array.name, version, name)
    if spread.rows is None:
        chain.add("Expand", np.asarray(spread.shape, np.int64))
    else:
        chain.add("Gather", spread.rows, axis=0)
        last = len(spread.shape) - 1
        if spread.axis != last:
            order = [k if k < spread.axis else k - 1 for k in range(last + 1)]
            order[spread.axis] = last
            chain.add("Transpose", perm=tuple(order))
    if spread.mask is not None:
        chain.add("Add", spread.mask)
    return chain.named(array.name)


def _store(edit: Edit, name: str, values: np.ndarray) -> str:
    edit.initialisers[name] = Array.of(name, values)
    return name


class _Chain:
    """Nodes in a row, each of which reads the result of the previous one."""

    def __init__(self, edit: Edit, name: str, version: int, start: str) -> None:
        self.edit, self.name, self.version, self.last = edit, name, version, start
        self.nodes: list[Node] = []

    def add(self, op: str, operand: np.ndarray | None = None, **attributes: Attribute) -> None:
        """Append a node that reads the last result and, if ``operand`` is given, this constant."""
        out = self.edit.fresh(f"{self.name}.{op}")
        inputs: tuple[str, ...] = (self.last,)
        if operand is not None:
            constant = _store(self.edit, self.edit.fresh(f"{out}.constant"), operand)
            self.edit.origins[constant] = Origin("CONSTANT_TENSOR")
            inputs = (self.last, constant)
        self.nodes.append(Node(out, op, "", self.version, inputs, (out,), attributes))
        self.last = out

    def named(self, name: str) -> list[Node]:
        """Return the nodes; the result of the last one is named ``name``."""
        end = self.nodes[-1]
        self.nodes[-1] = Node(end.name, end.op, "", end.version, end.inputs, (name,), end.attributes)
        return self.nodes
