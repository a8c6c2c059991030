"""Restore weights from which an exporter computed a larger constant tensor that repeats their elements.

If the large tensor were trained, the copies of an element would diverge. So nodes compute it, bit-equal, from
the weight: a parameter that equals it when broadcast, or its distinct values.
"""

from __future__ import annotations

import math
import re
from dataclasses import dataclass, replace

import numpy as np

from rematplan.ir.onnx import weight_roles as roles
from rematplan.ir.onnx.draft import Array, Edit, Origin
from rematplan.ir.onnx.graph import Attribute, Node
from rematplan.ir.onnx.weights_or_buffers import BUFFER, GENERATED, LARGE, Evidence

MAX_ELEMENTS = 1 << 22  # larger tensors are not analysed
FORBIDDING = -50.0  # an attention mask adds this or less to the scores of forbidden positions
EXPANDED = re.compile(r"expand(_\d+)?$")  # dynamo's name for the result of an expand
# Dynamo's names for results that repeat no element.
NOT_REPEATING = re.compile(
    r"(abs|exp|log|neg|permute|reshape|softplus|sqrt|squeeze|t|transpose|unsqueeze|val|view)(_\d+)*$"
)


@dataclass(frozen=True)
class Repetition:
    """How a tensor of the shape ``shape`` is computed from a smaller weight."""

    weight: np.ndarray
    shape: tuple[int, ...]
    rows: np.ndarray | None = None
    """The row of the matrix ``weight`` for each vector along ``axis``; None: the weight is broadcast."""
    axis: int = 0
    mask: np.ndarray | None = None
    """A constant that is added afterwards, or None."""


def restore_repeated_weights(edit: Edit, evidence: Evidence) -> int:
    """Replace initialisers that an exporter computed by repeating a weight by that weight and nodes; return how many.
    Tensors above `MAX_ELEMENTS` and those that layers read as weights stay."""
    made: dict[str, list[Node]] = {}
    for name in tuple(edit.initialisers):
        array = edit.float_weight(name)
        readers = evidence.used.readers.get(name)
        if array is None or not readers or not _may_repeat(array, evidence):
            continue
        version = readers[0][0].version
        whole = _broadcast_source(edit, array)
        repetition = None if whole else repetition_of(array.load(), bool(EXPANDED.match(name)))
        if whole:
            del edit.initialisers[name]
            chain = _Chain(edit, name, version, whole)
            chain.add("Expand", np.asarray(array.shape, np.int64))
            made[name] = chain.ending_in(name)
        elif repetition is not None:
            made[name] = _replacement(edit, array, repetition, version)
    waiting = dict(made)
    nodes: list[Node] = []
    for node in edit.nodes:
        for name in node.inputs:
            nodes.extend(waiting.pop(name, ()))
        nodes.append(node)
    edit.nodes[:] = nodes
    return len(made)


def _may_repeat(array: Array, evidence: Evidence) -> bool:
    """Return whether an initialiser may repeat a smaller weight, judged without its values."""
    if len(array.shape) < 2 or not 1 < math.prod(array.shape) <= MAX_ELEMENTS:
        return False
    sources = evidence.origins.get(array.name, Origin()).folded_from
    steps = [s for s in (array.name, *sources) if not evidence.origins.get(s, Origin()).kind]
    if sources and all(NOT_REPEATING.match(step) for step in steps):
        return False
    made = sources or GENERATED.match(array.name)
    # Not if a layer reads it in an input for weights: then it is that layer's weight.
    return bool(made) and not roles.in_weight_input(array.name, evidence.used) and evidence.is_weight(array)


def _broadcast_source(edit: Edit, array: Array) -> str:
    """Return the name of a recorded parameter that equals ``array`` when broadcast; '' if there is none."""
    # For example, a linear layer of an all-zero state is folded to copies of its bias.
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


def repetition_of(values: np.ndarray, expanded: bool = False) -> Repetition | None:
    """Find out from a tensor's values how it repeats a smaller weight; None if no repetition is found. ``expanded``:
    if all values are equal, or repeat along all axes, whether the first axis counts as repeated; if not, none does."""
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
        return Repetition(table, values.shape, np.ascontiguousarray(places), axis, mask)
    if mask is None and small.shape == values.shape:
        return None
    return Repetition(small, values.shape, mask=mask)


def _without_mask(values: np.ndarray, wide: np.ndarray) -> tuple[np.ndarray, np.ndarray | None]:
    """Split ``values`` into two parts that sum to it: a rest and an attention mask, or None if no mask is recognised.
    ``wide``: the same values in double precision."""
    # Values of magnitude `LARGE` or more are a mask, unless all are that large.
    large = np.abs(wide) >= LARGE
    zero = np.zeros_like(values)
    if large.any():
        if large.all():
            return values, None
        return np.where(large, zero, values), np.where(large, values, zero)
    # Constant along the first axis, except for values lower by more than 50.
    base = values.max(0, keepdims=True)
    below = np.rint(wide - base.astype(np.float64)).astype(values.dtype)
    told_apart = (below < FORBIDDING).any() and ((below == 0) | (below < FORBIDDING)).all()
    if told_apart and np.array_equal((base + below).astype(values.dtype), values):
        return base, below
    return values, None


def _rows(values: np.ndarray) -> tuple[np.ndarray, np.ndarray, int] | None:
    """Return the matrix of a tensor's distinct vectors along one axis, the row of each vector, and the axis, for which
    the matrix is smallest. None if along no axis two vectors are equal."""
    best = None
    for axis, length in enumerate(values.shape):
        flat = np.moveaxis(values, axis, -1).reshape(-1, length)
        table, first, places = np.unique(flat, axis=0, return_index=True, return_inverse=True)
        smaller = best is None or (table.size, len(table)) < (best[0].size, len(best[0]))
        if len(table) < len(flat) and smaller:
            order = np.argsort(first)  # number the rows in the order in which they first occur
            rank = np.empty_like(order)
            rank[order] = np.arange(len(order))
            shape = values.shape[:axis] + values.shape[axis + 1 :]
            best = table[order], rank[places.reshape(-1)].reshape(shape), axis
    return best


# ------------------------------------------------------------------ as nodes


def _replacement(edit: Edit, array: Array, repetition: Repetition, version: int) -> list[Node]:
    """Replace the initialiser ``array`` by the smaller weight of ``repetition``, and return the nodes that compute
    it. ``version``: their opset."""
    del edit.initialisers[array.name]
    folded_from = edit.origins.get(array.name, Origin()).folded_from
    sources = [s for s in folded_from if "." in s and not BUFFER.match(s.rpartition(".")[2])]
    whole = EXPANDED.match(array.name) and len(sources) == 1
    # The original name, if an expand of a single weight made the tensor.
    name = edit.fresh(sources[0] if whole else f"{array.name}.weight")
    _store(
        edit, name, repetition.weight.astype(array.dtype) if array.dtype != "bfloat16" else repetition.weight
    )
    edit.origins[name] = Origin("PARAMETER")
    chain = _Chain(edit, array.name, version, name)
    if repetition.rows is None:
        chain.add("Expand", np.asarray(repetition.shape, np.int64))
    else:
        chain.add("Gather", repetition.rows, axis=0)
        last = len(repetition.shape) - 1
        if repetition.axis != last:
            order = [k if k < repetition.axis else k - 1 for k in range(last + 1)]
            order[repetition.axis] = last
            chain.add("Transpose", perm=tuple(order))
    if repetition.mask is not None:
        chain.add("Add", repetition.mask)
    return chain.ending_in(array.name)


def _store(edit: Edit, name: str, values: np.ndarray) -> str:
    edit.initialisers[name] = Array.of(name, values)
    return name


class _Chain:
    """A sequence of new ONNX nodes, each of which reads the result of the node before. Their constants go
    into ``edit``.
    """

    def __init__(self, edit: Edit, name: str, version: int, start: str) -> None:
        self.edit, self.name, self.version, self.last = edit, name, version, start
        self.nodes: list[Node] = []

    def add(self, op: str, operand: np.ndarray | None = None, **attributes: Attribute) -> None:
        """Append a node that reads the last result and, if it is not None, the constant ``operand``."""
        out = self.edit.fresh(f"{self.name}.{op}")
        inputs: tuple[str, ...] = (self.last,)
        if operand is not None:
            constant = _store(self.edit, self.edit.fresh(f"{out}.constant"), operand)
            self.edit.origins[constant] = Origin("CONSTANT_TENSOR")
            inputs = (self.last, constant)
        self.nodes.append(Node(out, op, "", self.version, inputs, (out,), attributes))
        self.last = out

    def ending_in(self, name: str) -> list[Node]:
        """Return all nodes of the sequence, after renaming the result of the last one to ``name``."""
        return [*self.nodes[:-1], replace(self.nodes[-1], outputs=(name,))]
