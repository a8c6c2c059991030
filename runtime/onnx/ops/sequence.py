"""The ONNX ops on sequences of tensors. A sequence is a Python list, so building it makes no calls in a capture."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor

from rematplan.ir.onnx.graph import Node
from rematplan.runtime.onnx.ops.rows import integer, op, refuse, stated
from rematplan.runtime.onnx.ops.values import to_tensor

Value = Any  # Tensor | np.ndarray


@op("SequenceEmpty", 11, raw=True)
def sequence_empty(node: Node) -> list[Value]:
    """Run ONNX SequenceEmpty: an empty sequence, as a Python list."""
    return []


@op("SequenceConstruct", 11, raw=True)
def sequence_construct(node: Node, *values: Value) -> list[Value]:
    """Run ONNX SequenceConstruct: a sequence (Python list) of the inputs."""
    return list(values)


@op("SequenceInsert", 11, raw=True)
def sequence_insert(node: Node, items: list[Value], value: Value, at: Value = None) -> list[Value]:
    """Run ONNX SequenceInsert: a copy of the sequence with ``value`` before position ``at``. If ``at`` is None,
    ``value`` is appended."""
    place = len(items) if at is None else _place(node, at, len(items), end=True)
    return [*items[:place], value, *items[place:]]


@op("SequenceErase", 11, raw=True)
def sequence_erase(node: Node, items: list[Value], at: Value = None) -> list[Value]:
    """Run ONNX SequenceErase: a copy of the sequence without the element at position ``at``. If ``at`` is None, the
    last element is left out."""
    place = _place(node, np.asarray(-1) if at is None else at, len(items))
    return [*items[:place], *items[place + 1 :]]


@op("SequenceAt", 11, raw=True)
def sequence_at(node: Node, items: list[Value], at: Value) -> Value:
    """Run ONNX SequenceAt: the element at position ``at``; negative positions count from the end."""
    return items[_place(node, at, len(items))]


@op("SequenceLength", 11, raw=True)
def sequence_length(node: Node, items: list[Value]) -> np.ndarray:
    """Run ONNX SequenceLength: the number of elements of the sequence."""
    return np.asarray(len(items), np.int64)


@op("ConcatFromSequence", 11, raw=True)
def concat_from_sequence(node: Node, items: list[Value]) -> Value:
    """Run ONNX ConcatFromSequence along ``axis``, or stack if ``new_axis`` is set. The result is a NumPy array if all
    elements are; `ModelError` if there are none."""
    axis, new = integer(node, "axis", 0), bool(integer(node, "new_axis", 0))
    if not items:
        raise refuse(node, "an empty sequence cannot be concatenated")
    if all(isinstance(v, np.ndarray) for v in items):
        return np.stack(items, axis) if new else np.concatenate(items, axis)
    device = next(v.device for v in items if isinstance(v, Tensor))
    tensors = [v if isinstance(v, Tensor) else to_tensor(v).to(device) for v in items]
    return torch.stack(tensors, axis) if new else torch.cat(tensors, axis)


@op("SplitToSequence", 11, 24, raw=True)
def split_to_sequence(node: Node, value: Value, sizes: Value = None) -> list[Value]:
    """Run ONNX SplitToSequence: split ``value`` along ``axis`` into parts of the sizes in a list, or of one size, the
    last maybe smaller; `ModelError` for one size below 1. With None the parts have size 1, and lose the axis if
    ``keepdims`` is 0."""
    axis = integer(node, "axis", 0)
    length = value.shape[axis]
    if sizes is None:
        parts = _cut(value, [1] * length, axis)
        return parts if integer(node, "keepdims", 1) else [p.squeeze(axis) for p in parts]
    wanted = stated(node, 1, sizes)
    if wanted.ndim:
        each = [int(n) for n in wanted]
    else:
        size = int(wanted)
        if size < 1:
            raise refuse(node, f"parts cannot have size {size}")
        each = [min(size, length - start) for start in range(0, length, size)]
    return _cut(value, each, axis)


def _cut(value: Value, sizes: Sequence[int], axis: int) -> list[Value]:
    if isinstance(value, np.ndarray):
        return list(np.split(value, np.cumsum(sizes)[:-1], axis))
    return list(torch.split(value, list(sizes), axis))


def _place(node: Node, at: Value, count: int, end: bool = False) -> int:
    """Return a position in a sequence, counted from the front, as an integer; `ModelError` for one outside. ``end``:
    whether the place after the last element counts as inside."""
    place = int(stated(node, len(node.inputs) - 1, at))
    if not -count <= place < count + end:
        raise refuse(node, f"there is no place {place} of {count}")
    return place + count if place < 0 else place
