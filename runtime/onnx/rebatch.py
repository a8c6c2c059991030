"""Adapt a graph whose export stored its batch size in constants, such as ``Reshape(x, [1, 768])``, to another batch
size.

The graph runs without data at both sizes: the only axis that differs is the batch axis. Rules replace constants;
each result must then have its old shape, or one axis scaled.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
import torch

from rematplan.ir.errors import ModelError
from rematplan.ir.onnx.graph import Batch, Graph, Node, Weight
from rematplan.runtime.capture.fake_weights import without_data
from rematplan.runtime.graph.quiet_logs import quiet
from rematplan.runtime.guards.assertions import VALUES_DECIDE
from rematplan.runtime.onnx.instructions import Instruction
from rematplan.runtime.onnx.module import OnnxModule
from rematplan.runtime.onnx.ops.rows import refuse
from rematplan.runtime.onnx.ops.values import torch_dtype
from rematplan.runtime.onnx.rebatch_rules import RULES, KnownValue, Operand, RebatchCase, batch_axis

PICKING = frozenset({"Compress", "Gather", "GatherElements", "GatherND", "Slice", "Split", "TopK"})


def rebatched(graph: Graph) -> Graph:
    """Return a graph whose constants fit the batch size bound to its inputs, or the same graph if nothing must change.
    If the adaptation fails, raise `ModelError` if the file states its batch size, else return the same graph."""
    batch = graph.batch
    if batch is None:
        return graph
    work = _Rebatching(graph, batch)
    try:
        before = dict(work.values(batch.traced))
    except ModelError:
        if batch.fixed:
            raise
        return graph  # the graph does not run at that batch size, so its constants were made for another one
    try:
        work.follow(before)
    except ModelError as error:
        if batch.fixed:
            raise ModelError(
                f"the file is for a batch of {batch.traced} and cannot be adapted to {batch.size}: {error}"
            ) from None
        return graph  # running the graph will report the error
    return work.result()


def _seen(value: Any) -> KnownValue | None:
    if isinstance(value, np.ndarray):
        return KnownValue(value.shape, value)
    return KnownValue(tuple(value.shape), None) if isinstance(value, torch.Tensor) else None


@dataclass
class _Rebatching:
    """The adaptation of one graph to another batch size, in progress."""

    graph: Graph
    """The unchanged graph."""
    batch: Batch
    """The old and the wanted batch size, and the batch axes of the inputs."""
    module: OnnxModule = field(init=False)
    """The graph as a module, made for each run."""
    nodes: list[Node] = field(default_factory=list)
    """The nodes of the result so far, in order."""
    weights: list[Weight] = field(default_factory=list)
    """The constants that are added."""
    changed: int = 0
    """The number of nodes that were changed."""

    # -------------------------------------------------------------- running without data

    def _begin(self, size: int) -> tuple[dict[str, Any], Any]:
        """Make ``module`` without data. Return its inputs, at batch size ``size``, and its weights by name, and the
        mode in which to run it."""
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

    def values(self, size: int) -> Iterator[tuple[str, KnownValue | None]]:
        """Run the graph without data at batch size ``size``. Yield the nodes' inputs and outputs by name, None for
        what is no tensor."""
        values, mode = self._begin(size)
        with mode, torch.no_grad(), quiet():
            for step in self.module.program:
                self._advance(step, values)
                yield from ((n, _seen(values[n])) for n in (*step.node.inputs, *step.node.outputs) if n)

    def _advance(self, step: Instruction, values: dict[str, Any]) -> None:
        """Execute one node; `ModelError` if it needs values, which do not exist here."""
        try:
            self.module.advance(step, values)
        except VALUES_DECIDE as error:
            raise getattr(error, "refusal", error) from None

    def follow(self, before: Mapping[str, KnownValue | None]) -> None:
        """Run the graph without data at the wanted batch size, and collect the result's ``nodes``. Before a node runs,
        those of its constants that were made for the export's batch size are replaced. ``before``: all values at that
        size, by name. `ModelError` if a result does not follow the batch."""
        values, mode = self._begin(self.batch.size)
        with mode, torch.no_grad(), quiet():
            for step in self.module.program:
                node = self._changed(step.node, values, before)
                self.nodes.append(node)
                self._advance(replace(step, node=node), values)
                for name in filter(None, node.outputs):
                    self._check(node, before.get(name), _seen(values[name]))
                self._check_kept(node, values, before)

    def _check(self, node: Node, old: KnownValue | None, new: KnownValue | None) -> None:
        if old is None or new is None or old.shape == new.shape:
            return
        axis = batch_axis(old.shape, new.shape)
        if axis is None or new.shape[axis] * self.batch.traced != old.shape[axis] * self.batch.size:
            raise refuse(node, f"its result of shape {old.shape} would become {new.shape}")

    def _check_kept(
        self, node: Node, values: dict[str, Any], before: Mapping[str, KnownValue | None]
    ) -> None:
        """Raise `ModelError` for a node that selects some samples of the batch, such as a Gather. Its data has a batch
        axis, but no result has one."""

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

    def _changed(self, node: Node, values: dict[str, Any], before: Mapping[str, KnownValue | None]) -> Node:
        """Return a node with new inputs where its rule replaces them, after adding the nodes and constants that make
        these; the node itself if the rule replaces none."""
        rule = None if node.domain else RULES.get(node.op)
        if rule is None:
            return node
        old = [before.get(n) if n else None for n in node.inputs]
        new = [_seen(values[n]) if n else None for n in node.inputs]
        operands = rule(RebatchCase(node, self.batch, old, new, before.get(node.outputs[0])))
        if not operands:
            return node
        self.changed += 1
        inputs = list(node.inputs)
        for at, operand in operands.items():
            inputs[at] = self._operand(node, at, operand, values)
        return replace(node, inputs=tuple(inputs))

    def _operand(self, node: Node, at: int, operand: Operand, values: dict[str, Any]) -> str:
        """Add a constant, and for Expand and Tile a node that applies it to the old input. Return the new input's
        name."""
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
        """Return the changed graph, with a note on the number of changed nodes and without shapes of its outputs; the
        unchanged graph if no node was changed."""
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
