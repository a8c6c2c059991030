"""Rules, one for each ONNX op, that replace constants of a node that an export made for one batch size."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from rematplan.ir.onnx.graph import Batch, Node
from rematplan.runtime.onnx.ops.rows import refuse
from rematplan.runtime.onnx.ops.shape import reshape

Shape = tuple[int, ...]


@dataclass(frozen=True)
class KnownValue:
    """The shape of a value at one batch size, and its content if that is known without running on data."""

    shape: Shape
    """The shape."""
    known: np.ndarray | None
    """The content; None if it depends on data."""


@dataclass(frozen=True)
class RebatchCase:
    """A node that may contain the export's batch size in its constants, with its inputs at two batch sizes."""

    node: Node
    """The node."""
    batch: Batch
    """The export's and the wanted batch size."""
    old: list[KnownValue | None]
    """The inputs at the export's batch size; None for an absent one."""
    new: list[KnownValue | None]
    """The inputs at the wanted batch size; None for an absent one."""
    result: KnownValue | None
    """The first result at the export's batch size."""

    def constant(self, at: int) -> np.ndarray | None:
        """Return the content of the node's input at position ``at`` if it is known and equal at the two batch sizes;
        otherwise None."""
        if at >= len(self.old):
            return None
        old, new = self.old[at], self.new[at]
        if old is None or new is None or old.known is None or new.known is None:
            return None
        return new.known if np.array_equal(old.known, new.known) else None

    def axis(self, at: int) -> int | None:
        """Return the only axis in which input ``at`` differs between the two batch sizes; None if there is none or
        more than one."""
        if at >= len(self.old):
            return None
        old, new = self.old[at], self.new[at]
        return None if old is None or new is None else batch_axis(old.shape, new.shape)

    def scaled(self, shape: Shape, axis: int) -> Shape | None:
        """Return ``shape`` with ``axis`` scaled to the wanted batch, or None if it is no multiple of the export's."""
        if shape[axis] % self.batch.traced:
            return None
        size = shape[axis] // self.batch.traced * self.batch.size
        return (*shape[:axis], size, *shape[axis + 1 :])


@dataclass(frozen=True)
class Operand:
    """The replacement of one input of a node: a constant, or the old input repeated along the batch."""

    numbers: Shape | np.ndarray
    """The constant's content, or the second input of the new node: the shape of Expand, the repeats of Tile."""
    op: str = ""
    """Empty if a constant replaces the input; else Expand or Tile, a new node that is applied to the old input."""


Operands = dict[int, Operand]  # by the input's position


def batch_axis(old: Shape, new: Shape) -> int | None:
    """Return the only axis in which two shapes differ; None if none or several do, or the number of axes differs."""
    if len(old) != len(new):
        return None
    found = [at for at, (a, b) in enumerate(zip(old, new, strict=True)) if a != b]
    return found[0] if len(found) == 1 else None


def _reshape(case: RebatchCase) -> Operands:
    """Return the new shape of a Reshape whose input has the batch; nothing if the old one follows the batch or
    something is unknown. `ModelError` if the result has no axis for the batch."""
    target, axis, source = case.constant(1), case.axis(0), case.old[0]
    if target is None or axis is None or source is None or case.result is None:
        return {}
    made = case.result.shape
    lead = math.prod(source.shape[:axis])
    places = [q for q in range(len(made)) if math.prod(made[:q]) == lead and made[q] % case.batch.traced == 0]
    wanted = case.scaled(made, places[0]) if places else None
    if wanted is None:
        raise refuse(case.node, f"its shape {target.tolist()} has no place for the batch")
    new = case.new[0]
    assert new is not None
    return {} if _reshaped(case.node, new.shape, target) == wanted else {1: Operand(wanted)}


def _reshaped(node: Node, shape: Shape, target: np.ndarray) -> Shape | None:
    """Return the shape of a Reshape's result. None if the input's elements do not fill it."""
    try:
        return tuple(reshape(node, torch.empty(shape, device="meta"), target).shape)
    except RuntimeError:
        return None


def _expand(case: RebatchCase) -> Operands:
    """Return the new shape of an Expand: its batch axis scaled. If the input has no batch axis, the first axis is
    scaled if the Expand makes it and its size is the export's batch, above 1. Nothing in other cases."""
    target, source, new = case.constant(1), case.old[0], case.new[0]
    if target is None or source is None or new is None or case.result is None:
        return {}
    made, axis = case.result.shape, case.axis(0)
    if axis is not None:
        at = axis + len(made) - len(source.shape)
        wanted = case.scaled(made, at)
        return {1: Operand(wanted)} if wanted is not None and target.size else {}
    grown = len(made) > len(source.shape) or (source.shape and source.shape[0] == 1)
    wanted = (
        case.scaled(made, 0) if case.batch.traced > 1 and grown and made[0] == case.batch.traced else None
    )
    return {} if wanted is None else {1: Operand(wanted)}


def _concat(case: RebatchCase) -> Operands:
    """Return an Expand for each input that lacks the batch and has size 1 along the batch axis, if the export's batch
    is 1. Nothing if the batched inputs have different batch axes; no Expand along the axis of concatenation."""
    axes = [case.axis(at) for at in range(len(case.old))]
    batched = {a for a in axes if a is not None}
    along: Any = case.node.attributes.get("axis", 1)
    if len(batched) != 1:
        return {}
    (axis,) = batched
    found: Operands = {}
    for at, seen in enumerate(case.old):
        if seen is None or axes[at] is not None or axis == along % max(1, len(seen.shape)):
            continue
        if case.batch.traced == 1 and seen.shape[axis] == 1:
            found[at] = Operand(case.scaled(seen.shape, axis) or seen.shape, "Expand")
    return found


def _resize(case: RebatchCase) -> Operands:
    sizes, axis = case.constant(3), case.axis(0)
    if sizes is None or axis is None or case.node.attributes.get("axes") or not sizes.size:
        return {}
    wanted = case.scaled(tuple(int(n) for n in sizes), axis)
    return {} if wanted is None else {3: Operand(wanted)}


def _recurrent(case: RebatchCase) -> Operands:
    """Return an Expand for each initial state of a recurrent layer that is for a batch of one, as the export is.
    Nothing if the layer's input has no batch axis, or the export another batch."""
    if case.axis(0) is None or case.batch.traced != 1:
        return {}
    at_batch = 0 if case.node.attributes.get("layout") else 1
    found: Operands = {}
    for at in (5, 6):
        seen = case.old[at] if at < len(case.old) else None
        if seen is not None and case.axis(at) is None and seen.shape[at_batch] == 1:
            found[at] = Operand(case.scaled(seen.shape, at_batch) or seen.shape, "Expand")
    return found


def _gather(case: RebatchCase) -> Operands:
    """Return the new indices of a Gather along the batch axis; nothing along another axis. `ModelError` unless the
    export has a batch of one and the indices are known, with a first axis of size 1."""
    places, axis, data = case.constant(1), case.axis(0), case.old[0]
    along: Any = case.node.attributes.get("axis", 0)
    if axis is None or data is None or axis != along % len(data.shape):
        return {}
    if places is None or case.batch.traced != 1 or places.ndim == 0 or places.shape[0] != 1:
        raise refuse(case.node, "it picks from the batch")
    each = data.shape[axis]
    # The indices of one sample, at the offset of each sample. Exporters write strided slices as such a
    # Gather.
    starts = np.arange(case.batch.size).reshape(-1, *[1] * (places.ndim - 1)) * each
    return {1: Operand(np.where(places < 0, places + each, places) + starts)}


def _gather_elements(case: RebatchCase) -> Operands:
    """Return the expanded data of a GatherElements with an export of batch one, if the data's size along the batch axis
    of the indices is 1; else nothing."""
    axis, table = case.axis(1), case.old[0]
    along: Any = case.node.attributes.get("axis", 0)
    if axis is None or table is None or case.axis(0) is not None or case.batch.traced != 1:
        return {}
    if axis == along % len(table.shape) or table.shape[axis] != 1:
        return {}
    return {0: Operand(case.scaled(table.shape, axis) or table.shape, "Expand")}


def _elementwise(case: RebatchCase) -> Operands:
    """Return the replaced inputs of an elementwise op. For an export of batch one, an input without a batch is repeated
    if it is as long as another one's axis with the batch."""
    from_end: dict[int, int] = {}  # axes that contain the batch, counted from the last → their old sizes
    for at, seen in enumerate(case.old):
        axis = case.axis(at)
        if seen is not None and axis is not None:
            from_end[axis - len(seen.shape)] = seen.shape[axis]
    found: Operands = {}
    for at, seen in enumerate(case.old):
        if seen is None or case.axis(at) is not None:
            continue
        # An axis may combine the batch with something else, such as windows of images.
        for axis, size in from_end.items():
            if -axis <= len(seen.shape) and seen.shape[axis] == size > 1 and case.batch.traced == 1:
                times = [1] * len(seen.shape)
                times[axis] = case.batch.size
                found[at] = Operand(tuple(times), "Tile")
    return found


RULES: Mapping[str, Callable[[RebatchCase], Operands]] = {
    **dict.fromkeys(("Add", "And", "Div", "Mul", "Or", "Sub", "Where"), _elementwise),
    "Concat": _concat,
    "Expand": _expand,
    "GRU": _recurrent,
    "Gather": _gather,
    "GatherElements": _gather_elements,
    "LSTM": _recurrent,
    "RNN": _recurrent,
    "Reshape": _reshape,
    "Resize": _resize,
}
