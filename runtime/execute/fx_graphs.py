"""A plan as two fx graphs, forward and backward, for compilers.

The forward graph returns the outputs and the values that the backward graph needs. The nodes are in the
plan's order. fx's generated code frees a value after its last use, which is where the plan frees it.
"""

from __future__ import annotations

import operator
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import fx, nn

from rematplan.ir import ProblemError
from rematplan.planner.core.schedule import Free, Run, Schedule
from rematplan.runtime.execute.random_replay import replayed_ops
from rematplan.runtime.graph.captured_step import Call, CapturedStep, substitute
from rematplan.runtime.graph.compat import detect_fake_mode, run_and_save_rng_state, run_with_rng_state
from rematplan.runtime.problem.loss_boundary import split_at_loss


@dataclass(frozen=True)
class PlanGraphs:
    """The two fx graphs of a plan.

    ``forward``: takes parameters, buffers and batch; returns the module's outputs and the new content of changed
    inputs, followed by the saved values. ``backward``: takes the saved values followed by the tangents; returns the
    gradients. Outputs and gradients are in the order of `CapturedStep.outputs`, inputs and tangents in that of
    `CapturedStep.inputs`.
    """

    forward: fx.GraphModule
    backward: fx.GraphModule
    saved: tuple[str, ...]
    """Names of the saved values, in order."""


def plan_graphs(step: CapturedStep, schedule: Schedule) -> PlanGraphs:
    """Return a schedule as two fx graphs, forward and backward.

    The forward writes the buffers' new content into the buffers, and passes copies of the old content to the
    backward.

    Args:
        step: the captured step.
        schedule: a schedule of its planning problem with a loss boundary (`loss_boundary.with_loss_boundary`).

    Raises:
        ProblemError: the schedule has an op that the step lacks, or reads a tensor that is not resident; or an
            output, or a tensor that the backward needs, does not exist at the boundary.
    """
    buffers = {i.target: i.value for i in step.inputs if i.kind == "buffer"}
    own = split_at_loss(step, schedule)
    schedule, boundary = own.schedule, own.boundary
    replayed = replayed_ops(step, schedule)
    forward = _Emitter(step, replayed)
    for i in step.inputs:
        if i.kind not in ("tangent", "constant"):
            forward.placeholder(i.value, step.values[i.value].fake)
    forward.steps(schedule[:boundary])
    backward = _Emitter(step, replayed, forward)
    for i in step.inputs:
        if i.kind == "tangent":
            backward.placeholder(i.value, step.values[i.value].fake)
    backward.steps(schedule[boundary:])
    gradients = [backward.use(o.value) for o in step.outputs if "gradient" in o.kind]
    saved = tuple(backward.taken)
    outputs = [forward.use(o.value) for o in step.outputs if o.kind in ("output", "renewed")]
    old = set(buffers.values())
    kept = [forward.own(v) if v in old else forward.use_saved(v) for v in saved]
    for o in step.outputs:
        if o.kind == "buffer":
            forward.write(buffers[o.target], o.value)
    return PlanGraphs(forward.module((*outputs, *kept)), backward.module(gradients), saved)


class _Emitter:
    """Builds one fx graph.

    ``before``: the emitter of an earlier graph; its values that this graph uses become further inputs of this graph.
    """

    def __init__(self, step: CapturedStep, replayed: set[str], before: _Emitter | None = None) -> None:
        self.step, self.replayed, self.before = step, replayed, before
        self.graph = fx.Graph()
        self.root = nn.Module()
        self.nodes: dict[str, fx.Node] = {}  # value (or generator state) → the node that has it now
        self.storage_values: dict[str, list[str]] = {}  # storage → its values that have nodes
        self.taken: dict[str, None] = {}  # values taken from ``before``
        self.gone: set[str] = set()  # storages that may not be taken any more
        self.first: fx.Node | None = None

    def placeholder(self, name: str, fake: torch.Tensor) -> fx.Node:
        """Add an input to the graph and return its node."""
        node = self.graph.placeholder(name)
        node.meta["val"] = fake
        self.first = self.first or node
        self._bring(name, node)
        return node

    def module(self, results: Sequence[fx.Node]) -> fx.GraphModule:
        """Return the finished graph."""
        self.graph.output(tuple(results))
        self.graph.lint()
        return fx.GraphModule(self.root, self.graph)

    def steps(self, schedule: Schedule) -> None:
        """Add a schedule's runs to the graph."""
        for one in schedule:
            if isinstance(one, Free):
                self._drop(one.tensor)
            else:
                self._run(one)

    def use(self, value: str) -> fx.Node:
        """Return the node of a value. A view without a node gets one; a value of an earlier graph becomes an
        input."""
        stack = [value]
        while stack:
            name = stack[-1]
            if name in self.nodes:
                stack.pop()
                continue
            call = self.step.call.get(self.step.values[name].call or "")
            if call is not None and call.is_view:
                missing = [v for v in _values(call) if v not in self.nodes]
                stack += missing
                if not missing:
                    self._emit(call)
                    stack.pop()
                continue
            self._take(name)
            stack.pop()
        return self.nodes[value]

    def use_saved(self, name: str) -> fx.Node:
        """Return the node of a value or generator state that the later graph takes."""
        return self.nodes[name] if name in self.nodes else self.use(name)

    def write(self, place: str, value: str) -> None:
        """Copy a value into an input."""
        node = self.graph.call_function(torch.ops.aten.copy_.default, (self.use(place), self.use(value)))
        node.meta["val"] = self.step.values[place].fake

    def own(self, value: str) -> fx.Node:
        """Return the node of a copy of a value."""
        node = self.graph.call_function(torch.ops.aten.clone.default, (self.use(value),))
        node.meta["val"] = self.step.values[value].fake
        return node

    def _take(self, name: str, fake: Any = None) -> None:
        step = self.step
        if name in step.constants:
            setattr(self.root, name, step.constants[name])
            node = self.graph.create_node("get_attr", name)
            node.meta["val"] = step.values[name].fake
            self._bring(name, node)
            return
        storage = step.values[name].storage if name in step.values else name
        if self.before is None or name not in self.before.nodes or storage in self.gone:
            raise ProblemError(f"{step.name}: {name!r} is read, but is not resident")
        with self.graph.inserting_before(self.first):
            node = self.graph.placeholder(name)
        node.meta["val"] = self.before.nodes[name].meta["val"] if fake is None else fake
        self.taken[name] = None
        self._bring(name, node)

    def _bring(self, name: str, node: fx.Node) -> None:
        self.nodes[name] = node
        if name in self.step.values:
            self.storage_values.setdefault(self.step.values[name].storage, []).append(name)

    def _drop(self, storage: str) -> None:
        for name in self.storage_values.pop(storage, ()):
            self.nodes.pop(name, None)
        self.gone.add(storage)

    def _run(self, run: Run) -> None:
        call = self.step.call.get(run.op)
        if call is None:
            raise ProblemError(f"{self.step.name} has no op named {run.op!r}")
        for value in _values(call):
            self.use(value)
        for storage in self.step.writes(call):
            self._drop(storage)
        self._emit(call)

    def _emit(self, call: Call) -> None:
        args = substitute(call.args, self.use)
        kwargs = dict(substitute(call.kwargs, self.use))
        fakes = [self.step.values[r].fake if r else None for r in call.results]
        val = fakes[0] if call.single else tuple(fakes)
        node = self._call(call, args, kwargs, val)
        if call.single:
            self._bring(call.results[0] or call.name, node)
            return
        for at, result in enumerate(call.results):
            if result:
                self._bring(result, self._item(node, at, self.step.values[result].fake))

    def _call(self, call: Call, args: Any, kwargs: dict[str, Any], val: Any) -> fx.Node:
        """Return a call's node. A random call that runs again saves the generator's state at its first run
        and replays it later."""
        state = f"rng_{call.name}"
        if call.name not in self.replayed:
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


def _values(call: Call) -> list[str]:
    found: list[str] = []
    substitute((call.args, call.kwargs), found.append)
    return found


def _fake_state(step: CapturedStep) -> torch.Tensor:
    state = torch.get_rng_state() if step.device.type == "cpu" else torch.cuda.get_rng_state(step.device)
    mode = detect_fake_mode([v.fake for v in step.values.values()])
    return state if mode is None else mode.from_tensor(state)
