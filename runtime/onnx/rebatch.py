"""Adapt constants that an export made for one batch size to the batch size that its inputs are bound to.

Traced with a batch of one, a graph often has ``Reshape(x, [1, 768])`` where the network had ``x.flatten(1)``.
The graph is run twice without data: with the batch size of the export and with the wanted one. The axis in
which a value's shape differs is its batch axis. If a node's constants still contain the old batch size, the
batch belongs at the one position with as many elements before it as in the input, and is put there.
Afterwards every value must have its old shape with only the batch axis scaled; a node for which it has not is
refused by name.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
import torch

from rematplan.ir.errors import ModelError
from rematplan.ir.onnx.graph import Batch, Graph, Node, Weight
from rematplan.runtime.capture.fake_weights import without_data
from rematplan.runtime.graph.quiet_logs import quiet
from rematplan.runtime.onnx.module import Instruction, OnnxModule
from rematplan.runtime.onnx.ops.rows import refuse
from rematplan.runtime.onnx.ops.values import torch_dtype

Shape = tuple[int, ...]

PICKING = frozenset({"Compress", "Gather", "GatherElements", "GatherND", "Slice", "Split", "TopK"})


def rebatched(graph: Graph) -> Graph:
    """Return the graph with its constants adapted to the batch size of its inputs; the same graph if nothing
    changes.

    Raises:
        ModelError: the file fixes its batch size, and a node cannot follow another one.
    """
    batch = graph.batch
    if batch is None:
        return graph
    work = _Rebatching(graph, batch)
    try:
        before = dict(work.values(batch.traced))
    except ModelError:
        if batch.fixed:
            raise
        return graph  # it does not run at that batch size, so no constants were made for it
    try:
        work.follow(before)
    except ModelError as error:
        if batch.fixed:
            raise ModelError(
                f"the file is for a batch of {batch.traced} and cannot be adapted to {batch.size}: {error}"
            ) from None
        return graph  # running the graph will report the error
    return work.result()


@dataclass(frozen=True)
class _Seen:
    """What is known of a value at one batch size: its shape, and its content (None if it is not known)."""

    shape: Shape
    known: np.ndarray | None


def _seen(value: Any) -> _Seen | None:
    if isinstance(value, np.ndarray):
        return _Seen(value.shape, value)
    return _Seen(tuple(value.shape), None) if isinstance(value, torch.Tensor) else None


@dataclass
class _Rebatching:
    """The graph while its nodes are changed, in order."""

    graph: Graph
    batch: Batch
    module: OnnxModule = field(init=False)
    nodes: list[Node] = field(default_factory=list)
    weights: list[Weight] = field(default_factory=list)
    changed: int = 0

    # -------------------------------------------------------------- running without data

    def _begin(self, size: int) -> tuple[dict[str, Any], Any]:
        places = set(self.batch.places)

        def inputs() -> list[torch.Tensor]:
            made = []
            for v in self.graph.inputs:
                shape = [size if (v.name, at) in places else n for at, n in enumerate(v.shape or ())]
                made.append(torch.empty(shape, dtype=torch_dtype(v.dtype, f"the graph input {v.name!r}")))
            return made

        module, batch, mode = without_data(lambda: OnnxModule(self.graph, device="meta").train(), inputs)
        assert isinstance(module, OnnxModule)
        self.module = module
        return module.start(batch), mode

    def values(self, size: int) -> Iterator[tuple[str, _Seen | None]]:
        """Yield every value by name, as it is with batch size ``size``."""
        values, mode = self._begin(size)
        with mode, torch.no_grad(), quiet():
            for step in self.module.program:
                self.module.advance(step, values)
                yield from ((n, _seen(values[n])) for n in (*step.node.inputs, *step.node.outputs) if n)

    def follow(self, before: Mapping[str, _Seen | None]) -> None:
        """Run with the wanted batch size, and change each node whose constants contain the old one."""
        values, mode = self._begin(self.batch.size)
        with mode, torch.no_grad(), quiet():
            for step in self.module.program:
                node = self._changed(step.node, values, before)
                self.nodes.append(node)
                self.module.advance(replace(step, node=node), values)
                for name in filter(None, node.outputs):
                    self._check(node, before.get(name), _seen(values[name]))
                self._check_kept(node, values, before)

    def _check(self, node: Node, old: _Seen | None, new: _Seen | None) -> None:
        if old is None or new is None or old.shape == new.shape:
            return
        axis = _batch_axis(old.shape, new.shape)
        if axis is None or new.shape[axis] * self.batch.traced != old.shape[axis] * self.batch.size:
            raise refuse(node, f"its result of shape {old.shape} would become {new.shape}")

    def _check_kept(self, node: Node, values: dict[str, Any], before: Mapping[str, _Seen | None]) -> None:
        """Refuse a node that selects a part of the batch and drops the rest."""

        def has_batch(name: str) -> bool:
            old, new = before.get(name), _seen(values[name])
            return old is not None and new is not None and old.shape != new.shape

        if (
            node.op in PICKING
            and has_batch(node.inputs[0])
            and not any(map(has_batch, filter(None, node.outputs)))
        ):
            raise refuse(node, "it picks from the batch")

    # -------------------------------------------------------------- changing nodes

    def _changed(self, node: Node, values: dict[str, Any], before: Mapping[str, _Seen | None]) -> Node:
        rule = None if node.domain else RULES.get(node.op)
        if rule is None:
            return node
        old = [before.get(n) if n else None for n in node.inputs]
        new = [_seen(values[n]) if n else None for n in node.inputs]
        operands = rule(_Case(node, self.batch, old, new, before.get(node.outputs[0])))
        if not operands:
            return node
        self.changed += 1
        inputs = list(node.inputs)
        for at, operand in operands.items():
            inputs[at] = self._operand(node, at, operand, values)
        return replace(node, inputs=tuple(inputs))

    def _operand(self, node: Node, at: int, operand: Operand, values: dict[str, Any]) -> str:
        """Return the name of a new constant, or of the result of a new node that applies it to an input."""
        stated = np.asarray(operand.numbers, np.int64)
        name = f"{node.name}.{at}.batch"
        self.weights.append(Weight(name, "int64", stated.shape, "constant", lambda: stated))
        values[name] = stated
        if not operand.op:
            return name
        made = f"{name}.{operand.op}"
        wide = Node(made, operand.op, "", 13, (node.inputs[at], name), (made,))
        self.nodes.append(wide)
        self.module.advance(Instruction.of(wide), values)
        return made

    def result(self) -> Graph:
        """Return the changed graph, with a note."""
        if not self.changed:
            return self.graph
        note = f"{self.changed} nodes that the export made for a batch of {self.batch.traced} follow the batch now"
        return replace(
            self.graph,
            nodes=tuple(self.nodes),
            weights=(*self.graph.weights, *self.weights),
            outputs=tuple(replace(o, shape=None) for o in self.graph.outputs),
            notes=(*self.graph.notes, note),
            batch=None,
        )


# ------------------------------------------------------------------ what nodes keep of an old batch


@dataclass(frozen=True)
class _Case:
    """A node, with its inputs at the old batch size (``old``) and at the new one (``new``), and its first
    result at the old one (``result``)."""

    node: Node
    batch: Batch
    old: list[_Seen | None]
    new: list[_Seen | None]
    result: _Seen | None

    def constant(self, at: int) -> np.ndarray | None:
        """Return a known input that is the same at both batch sizes; else None."""
        if at >= len(self.old):
            return None
        old, new = self.old[at], self.new[at]
        if old is None or new is None or old.known is None or new.known is None:
            return None
        return new.known if np.array_equal(old.known, new.known) else None

    def axis(self, at: int) -> int | None:
        """Return the batch axis of an input; None if it has none."""
        if at >= len(self.old):
            return None
        old, new = self.old[at], self.new[at]
        return None if old is None or new is None else _batch_axis(old.shape, new.shape)

    def scaled(self, shape: Shape, axis: int) -> Shape | None:
        """Return a shape of the old batch size with the given axis scaled to the new one; None if it is not
        divisible."""
        if shape[axis] % self.batch.traced:
            return None
        size = shape[axis] // self.batch.traced * self.batch.size
        return (*shape[:axis], size, *shape[axis + 1 :])


@dataclass(frozen=True)
class Operand:
    """What replaces a node's input.

    ``numbers``: the new values, if ``op`` is empty. Otherwise the input is replaced by the result of a node ``op``
    (Expand or Tile) that is applied to it with ``numbers`` as the shape or the repeats.
    """

    numbers: Shape | np.ndarray
    op: str = ""


Operands = dict[int, Operand]  # by the input's position


def _batch_axis(old: Shape, new: Shape) -> int | None:
    """Return the only axis in which two shapes differ; None if there is not exactly one."""
    if len(old) != len(new):
        return None
    found = [at for at, (a, b) in enumerate(zip(old, new, strict=True)) if a != b]
    return found[0] if len(found) == 1 else None


def _reshape(case: _Case) -> Operands:
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
    """Return the shape that a Reshape's target yields for an input of that shape; None if it does not fit."""
    sizes = [int(n) for n in target]
    if not node.attributes.get("allowzero"):
        sizes = [shape[i] if n == 0 and i < len(shape) else n for i, n in enumerate(sizes)]
    rest, total = math.prod(n for n in sizes if n != -1), math.prod(shape)
    if -1 in sizes:
        if not rest or total % rest:
            return None
        sizes[sizes.index(-1)] = total // rest
    return tuple(sizes) if math.prod(sizes) == total else None


def _expand(case: _Case) -> Operands:
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


def _concat(case: _Case) -> Operands:
    """Repeat operands without a batch (a class token) that are joined with operands that have one."""
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


def _resize(case: _Case) -> Operands:
    sizes, axis = case.constant(3), case.axis(0)
    if sizes is None or axis is None or case.node.attributes.get("axes") or not sizes.size:
        return {}
    wanted = case.scaled(tuple(int(n) for n in sizes), axis)
    return {} if wanted is None else {3: Operand(wanted)}


def _recurrent(case: _Case) -> Operands:
    """Repeat initial states that are constants for a batch of one."""
    if case.axis(0) is None or case.batch.traced != 1:
        return {}
    at_batch = 0 if case.node.attributes.get("layout") else 1
    found: Operands = {}
    for at in (5, 6):
        seen = case.old[at] if at < len(case.old) else None
        if seen is not None and case.axis(at) is None and seen.shape[at_batch] == 1:
            found[at] = Operand(case.scaled(seen.shape, at_batch) or seen.shape, "Expand")
    return found


def _gather(case: _Case) -> Operands:
    """Adapt constant indices along the batch axis (exporters write strided slices in this way): the same ones
    in each sample."""
    places, axis, data = case.constant(1), case.axis(0), case.old[0]
    along: Any = case.node.attributes.get("axis", 0)
    if axis is None or data is None or axis != along % len(data.shape):
        return {}
    if places is None or case.batch.traced != 1 or places.ndim == 0 or places.shape[0] != 1:
        raise refuse(case.node, "it picks from the batch")
    each = data.shape[axis]
    starts = np.arange(case.batch.size).reshape(-1, *[1] * (places.ndim - 1)) * each
    return {1: Operand(np.where(places < 0, places + each, places) + starts)}


def _gather_elements(case: _Case) -> Operands:
    """Repeat a table that has one row for the whole batch."""
    axis, table = case.axis(1), case.old[0]
    along: Any = case.node.attributes.get("axis", 0)
    if axis is None or table is None or case.axis(0) is not None or case.batch.traced != 1:
        return {}
    if axis == along % len(table.shape) or table.shape[axis] != 1:
        return {}
    return {0: Operand(case.scaled(table.shape, axis) or table.shape, "Expand")}


def _elementwise(case: _Case) -> Operands:
    """Repeat an operand that is as long as an axis which combines the batch with something else (windows of
    images)."""
    from_end: dict[int, int] = {}  # axes that contain the batch, counted from the last → their old sizes
    for at, seen in enumerate(case.old):
        axis = case.axis(at)
        if seen is not None and axis is not None:
            from_end[axis - len(seen.shape)] = seen.shape[axis]
    found: Operands = {}
    for at, seen in enumerate(case.old):
        if seen is None or case.axis(at) is not None:
            continue
        for axis, size in from_end.items():
            if -axis <= len(seen.shape) and seen.shape[axis] == size > 1 and case.batch.traced == 1:
                times = [1] * len(seen.shape)
                times[axis] = case.batch.size
                found[at] = Operand(tuple(times), "Tile")
    return found


RULES: Mapping[str, Callable[[_Case], Operands]] = {
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
