"""A plan as two fx graphs, forward and backward, for compilers such as Inductor.

The nodes are in the plan's order, and generated code frees a value after its last use, as the plan does.
"""

from __future__ import annotations

import operator
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import fx, nn

from rematplan.planner.core.schedule import Free, Schedule
from rematplan.runtime.execute.emitter import Emitter
from rematplan.runtime.graph.captured_step import Call, CapturedStep, substitute
from rematplan.runtime.graph.compat import detect_fake_mode, run_and_save_rng_state, run_with_rng_state
from rematplan.runtime.graph.generator_states import save_rng
from rematplan.runtime.problem.loss_boundary import split_at_loss


@dataclass(frozen=True)
class PlanGraphs:
    """The two fx graphs of a plan, with inputs, tangents, outputs and gradients in the order of the `CapturedStep`."""

    forward: fx.GraphModule
    """Takes parameters, buffers and batch. Returns outputs, the new content of changed inputs, and the saved values."""
    backward: fx.GraphModule
    """Takes the saved values, followed by the tangents, and returns the gradients."""
    saved: tuple[str, ...]
    """Names of the values that the backward graph takes from the forward graph, in order. States of random number
    generators are among them if random ops run again."""


def plan_graphs(step: CapturedStep, schedule: Schedule) -> PlanGraphs:
    """Return a schedule as two fx graphs. The forward graph writes the buffers' new content in place; the backward
    graph gets copies of the buffers from before. Raises `ProblemError` if the schedule does not fit the step."""
    buffers = {i.target: i.value for i in step.inputs if i.kind == "buffer"}
    split = split_at_loss(step, schedule)
    schedule, boundary = split.schedule, split.boundary
    forward = _GraphEmitter(step, schedule)
    for i in step.inputs:
        if i.kind not in ("tangent", "constant"):
            forward.placeholder(i.value, step.values[i.value].fake)
    forward.steps(0, boundary)
    backward = _GraphEmitter(step, schedule, forward)
    for i in step.inputs:
        if i.kind == "tangent":
            backward.placeholder(i.value, step.values[i.value].fake)
    backward.steps(boundary, len(schedule))
    gradients = [backward.use(o.value) for o in step.outputs if "gradient" in o.kind]
    saved = tuple(backward.saved)
    outputs = [forward.use(o.value) for o in step.outputs if o.kind in ("output", "renewed")]
    old = set(buffers.values())
    passed = [forward.copy_of(v) if v in old else forward.use_saved(v) for v in saved]
    for o in step.outputs:
        if o.kind == "buffer":
            forward.write(buffers[o.target], o.value)
    return PlanGraphs(forward.module((*outputs, *passed)), backward.module(gradients), saved)


class _GraphEmitter(Emitter):
    """Builds the fx graph of one half of a schedule. For the backward graph, values of ``before`` (the forward
    graph's emitter) become inputs."""

    def __init__(self, step: CapturedStep, schedule: Schedule, before: _GraphEmitter | None = None) -> None:
        super().__init__(step, schedule)
        self.before = before
        self.graph = fx.Graph()
        self.root = nn.Module()
        self.nodes: dict[str, fx.Node] = {}  # value or generator state → its present node
        self.saved: dict[str, None] = {}  # values taken from ``before``
        self.gone: set[str] = set()  # freed or recomputed storages: not taken from ``before`` any more
        self.first: fx.Node | None = None

    def placeholder(self, name: str, fake: torch.Tensor) -> fx.Node:
        """Add an input to the graph and return its node. ``name``: the value's. ``fake``: a tensor like the value."""
        node = self._input(name)
        node.meta["val"] = fake
        self.first = self.first or node
        self._set(name, node)
        return node

    def module(self, results: Sequence[fx.Node]) -> fx.GraphModule:
        """End the graph and return it as a module. ``results``: the nodes that the graph returns."""
        self.graph.output(tuple(results))
        self.graph.lint()
        return fx.GraphModule(self.root, self.graph)

    def steps(self, start: int, end: int) -> None:
        """Add the op executions at positions ``start`` to ``end`` (exclusive). A freed tensor is unusable until it is
        computed again. Raises `ProblemError` if an op is not in the step or reads what is not resident."""
        for at in range(start, end):
            one = self.schedule[at]
            if isinstance(one, Free):
                self.free(one.tensor)
                continue
            call = self.call_of(one, at)
            for storage in self.step.writes(call):
                self.free(storage)
            self.emit(call)

    def free(self, storage: str) -> list[str]:
        """Mark all values in a storage as dead and return those that had nodes. None is taken from the graph
        ``before`` afterwards."""
        freed = super().free(storage)
        for value in freed:
            del self.nodes[value]
        self.gone.add(storage)
        return freed

    def use(self, value: str) -> fx.Node:
        """Return a value's node; if there is none, add it as a view, a constant, or an input from ``before``."""
        self.make(value)
        return self.nodes[value]

    def use_saved(self, name: str) -> fx.Node:
        """Return the node of a value, or of a saved generator state, that the backward graph takes from this graph."""
        return self.nodes[name] if name in self.nodes else self.use(name)

    def write(self, place: str, value: str) -> None:
        """Add a node that copies a value into the input ``place`` of the graph, in place."""
        node = self.graph.call_function(torch.ops.aten.copy_.default, (self.use(place), self.use(value)))
        node.meta["val"] = self.step.values[place].fake

    def copy_of(self, value: str) -> fx.Node:
        """Add a node that clones a value, and return the node."""
        node = self.graph.call_function(torch.ops.aten.clone.default, (self.use(value),))
        node.meta["val"] = self.step.values[value].fake
        return node

    def fetch(self, value: str) -> bool:
        """Add a node for a constant, or for a value of the graph ``before`` that is no view and was not freed or made
        again since. Return whether the value is one of these."""
        if value in self.step.constants:
            setattr(self.root, value, self.step.constants[value])
            node = self.graph.create_node("get_attr", value)
            node.meta["val"] = self.step.values[value].fake
            self._set(value, node)
            return True
        known = self.before is not None and value in self.before.nodes
        if not known or self.is_view(value) or self.step.values[value].storage in self.gone:
            return False
        self._take(value)
        return True

    def _take(self, name: str) -> None:
        """Add a value of the graph ``before``, or a random state, as an input of this graph. ``name``: its name."""
        assert self.before is not None
        with self.graph.inserting_before(self.first):
            node = self._input(name)
        node.meta["val"] = self.before.nodes[name].meta["val"]
        self.saved[name] = None
        self._set(name, node)

    def _input(self, name: str) -> fx.Node:
        node = self.graph.placeholder(name)
        # As of a part of a split op; the generated code names its arguments by targets.
        if not name.isidentifier():
            node.target = node.name
        return node

    def _set(self, name: str, node: fx.Node) -> None:
        self.nodes[name] = node
        if name in self.step.values:
            self.mark_alive(name)

    def emit(self, call: Call) -> None:
        """Add the node of a call, and if the call returns several tensors, a node for each."""
        args = substitute(call.args, self.use)
        kwargs = substitute(call.kwargs, self.use)
        fakes = [self.step.values[r].fake if r else None for r in call.results]
        node = self._call(call, args, kwargs, fakes[0] if call.single else tuple(fakes))
        for at, result in enumerate(call.results):
            if result:
                self._set(result, node if call.single else self._item(node, at, fakes[at]))

    def _call(self, call: Call, args: Any, kwargs: dict[str, Any], val: Any) -> fx.Node:
        """Add a call and return the node of its result. A random op that runs again draws the same numbers, from the
        state that its first execution saves. ``val``: the fake result."""
        state = f"rng_{call.name}"
        if call.name not in self.rerun:
            return self._node(call.target, args, kwargs, val)
        if state not in self.nodes and (self.before is None or state not in self.before.nodes):
            fake = _fake_state(self.step)
            both = self._node(run_and_save_rng_state, (call.target, *args), kwargs, (fake, val))
            self.nodes[state] = self._item(both, 0, fake)
            return self._item(both, 1, val)
        if state not in self.nodes:
            self._take(state)
        return self._node(run_with_rng_state, (self.nodes[state], call.target, *args), kwargs, val)

    def _item(self, node: fx.Node, at: int, val: Any) -> fx.Node:
        return self._node(operator.getitem, (node, at), {}, val)

    def _node(self, target: Any, args: Any, kwargs: Mapping[str, Any], val: Any) -> fx.Node:
        node = self.graph.call_function(target, args, dict(kwargs))
        node.meta["val"] = val
        return node


def _fake_state(step: CapturedStep) -> torch.Tensor:
    state = save_rng(step.device)()
    mode = detect_fake_mode([v.fake for v in step.values.values()])
    return state if mode is None else mode.from_tensor(state)
