"""Gather what an exporter spread: a weight that it folded together with the constants around it.

A class token repeated over the batch, an embedding looked up at constant places, a table of relative positions
with a mask added: constant folding leaves one large tensor in which a weight's elements stand many times. Trained
as it is, each copy would go its own way. Here the copies become one weight again, with the nodes that spread it;
the tensor that these make is bit-equal to the file's. Elements are one if their values are. Where all values of a
tensor are the same (a table that starts at zero), nothing tells them apart, and only an expand is undone.
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

MAX_ELEMENTS = 1 << 22  # of a tensor that is looked into
FORBIDDING = -50.0  # what a mask adds at most where it forbids
EXPANDED = re.compile(r"expand(_\d+)?$")  # what dynamo calls the result of an expand


@dataclass(frozen=True)
class Spread:
    """How a tensor is made of a weight.

    ``rows``: for each place of the tensor without its axis ``axis``, the row of ``weight`` that stands there, along
    that axis; None: ``weight`` is broadcast to ``shape``. ``mask``: what is added then, or None.
    """

    weight: np.ndarray
    shape: tuple[int, ...]
    rows: np.ndarray | None = None
    axis: int = 0
    mask: np.ndarray | None = None


def gather_spread(edit: Edit, evidence: Evidence) -> int:
    """Put a weight, and the nodes that spread it, where a file has the spread tensor; how many."""
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
    """Whether the exporter made the tensor, of weights, and not as a layer's weight of another layout."""
    if len(array.shape) < 2 or not 1 < math.prod(array.shape) <= MAX_ELEMENTS:
        return False
    made = evidence.origins.get(array.name, Origin()).folded_from or GENERATED.match(array.name)
    return bool(made) and not roles.in_weight_input(array.name, evidence.used) and evidence.is_weight(array)


def _repeated(edit: Edit, array: Array) -> str:
    """A weight of which the tensor is copies only (a first step's linear layer of zeros leaves its bias), or ''."""
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
    """How the tensor is made of a smaller weight, or None if its values do not say that it is.

    ``expanded``: its first axis is known to be repeated.
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
    """The tensor before a mask was added, if one can be told from it, and the mask."""
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
    """The tensor as rows of a table along the axis that makes the table smallest: table, places, axis."""
    best = None
    for axis, length in enumerate(values.shape):
        flat = np.moveaxis(values, axis, -1).reshape(-1, length)
        table, first, places = np.unique(flat, axis=0, return_index=True, return_inverse=True)
        smaller = best is None or (table.size, len(table)) < (best[0].size, len(best[0]))
        if len(table) < len(flat) and smaller:
            order = np.argsort(first)  # in the order of their first places
            rank = np.empty_like(order)
            rank[order] = np.arange(len(order))
            shape = values.shape[:axis] + values.shape[axis + 1 :]
            best = table[order], rank[places.reshape(-1)].reshape(shape), axis
    return best


# ------------------------------------------------------------------ as nodes


def _nodes(edit: Edit, array: Array, spread: Spread, version: int) -> list[Node]:
    """The nodes that make the tensor. The weight has its source's name if it is as the module had it."""
    del edit.initialisers[array.name]
    told = edit.origins.get(array.name, Origin()).folded_from
    sources = [s for s in told if "." in s and not BUFFER.match(s.rpartition(".")[2])]
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
    edit.initialisers[name] = Array(name, values.dtype.name, values.shape, lambda: values)
    return name


class _Chain:
    """Nodes one behind the other."""

    def __init__(self, edit: Edit, name: str, version: int, start: str) -> None:
        self.edit, self.name, self.version, self.last = edit, name, version, start
        self.nodes: list[Node] = []

    def add(self, op: str, operand: np.ndarray | None = None, **attributes: Attribute) -> None:
        """One node that reads the last one's result and perhaps a constant."""
        out = self.edit.fresh(f"{self.name}.{op}")
        inputs: tuple[str, ...] = (self.last,)
        if operand is not None:
            constant = _store(self.edit, self.edit.fresh(f"{out}.constant"), operand)
            self.edit.origins[constant] = Origin("CONSTANT_TENSOR")
            inputs = (self.last, constant)
        self.nodes.append(Node(out, op, "", self.version, inputs, (out,), attributes))
        self.last = out

    def named(self, name: str) -> list[Node]:
        """The nodes, the last one's result under that name."""
        end = self.nodes[-1]
        self.nodes[-1] = Node(end.name, end.op, "", end.version, end.inputs, (name,), end.attributes)
        return self.nodes
