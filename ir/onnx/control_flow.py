"""Replace an If of known condition by its branch, and unroll Loops and Scans of known length.

Conditions and lengths come from constants and known shapes. If one depends on data, an error names the node.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np

from rematplan.ir.errors import ModelError
from rematplan.ir.onnx import weight_roles as roles
from rematplan.ir.onnx.constant_folding import MAX_ELEMENTS, constant_value, fold
from rematplan.ir.onnx.draft import Array, Body, Draft
from rematplan.ir.onnx.graph import Node, Value

MAX_ITERATIONS = 10_000  # the most iterations of one loop
MAX_NODES = 200_000  # the most nodes of the graph after unrolling
PLAIN = 13  # the opset of the nodes inserted for stacking and indexing


def captured(name: str, bodies: Mapping[str, Mapping[str, Body]]) -> tuple[str, ...]:
    """Return the names of the values that a node's subgraphs read from the graphs around them.

    Subgraphs nested in the node's subgraphs are included.
    """
    found: dict[str, None] = {}
    for body in bodies.get(name, {}).values():
        own = {*body.inputs, *body.initialisers, *(o for n in body.nodes for o in n.outputs)}
        reads = [i for n in body.nodes for i in (*n.inputs, *captured(n.name, bodies))]
        found.update(dict.fromkeys(n for n in (*reads, *body.outputs) if n and n not in own))
    return tuple(found)


def without_subgraphs(
    draft: Draft, inputs: Sequence[Value], bound: Mapping[str, int]
) -> tuple[Draft, tuple[str, ...]]:
    """Replace every If of an ONNX graph by its branch, and unroll every Loop and Scan. Return the content and a note if
    there were any. ``bound``: sizes by symbol. `ModelError` if that is impossible, as for a condition or length that
    depends on data."""
    if not draft.bodies:
        return draft, ()
    shapes = {name: tuple(bound.get(str(d), d) for d in dims) for name, dims in draft.stated.items()}
    shapes |= {name: array.shape for name, array in draft.initialisers.items()}
    shapes |= {v.name: v.shape or () for v in inputs}
    known = {
        name: tuple(d for d in s if isinstance(d, int))
        for name, s in shapes.items()
        if all(isinstance(d, int) and d >= 0 for d in s)
    }
    work = _Unrolling(draft, dict(draft.initialisers), known)
    for array in draft.initialisers.values():
        work.learn(array)
    work.walk(draft.nodes, {})
    work.check()
    note = (
        f"{work.count} subgraphs of known conditions and lengths were unrolled into {len(work.nodes)} nodes"
    )
    return replace(draft, nodes=tuple(work.nodes), initialisers=work.initialisers, bodies={}), (note,)


@dataclass
class _Unrolling:
    """The graph that is built while control flow is replaced."""

    draft: Draft
    """The original content."""
    initialisers: dict[str, Array]
    """Stored tensors of the new graph, by name."""
    shapes: dict[str, tuple[int, ...]]
    """Known shapes of values, by name."""
    nodes: list[Node] = field(default_factory=list)
    known: dict[str, np.ndarray] = field(default_factory=dict)
    """Small constant values, by name."""
    count: int = 0
    """How many nodes with subgraphs were replaced."""
    fresh: int = 0
    """How many subgraphs were inserted; it makes new names unique."""

    def learn(self, array: Array) -> None:
        """Record the value of a small stored tensor in ``known``."""
        # Single floating-point numbers too, because loop conditions compare counters with them.
        if math.prod(array.shape) <= (1 if array.dtype in roles.FLOATS else MAX_ELEMENTS):
            self.known[array.name] = array.load()

    def walk(self, nodes: Iterable[Node], names: Mapping[str, str]) -> None:
        """Append nodes to the new graph. Nodes with subgraphs are replaced first; `ModelError` for other kinds than If,
        Loop and Scan.

        ``names``: the new graph's name for each value whose name changes.
        """
        for node in nodes:
            inputs = tuple(names.get(i, i) for i in node.inputs)
            outputs = tuple(names.get(o, o) for o in node.outputs)
            bodies = self.draft.bodies.get(node.name)
            if bodies is None:
                self.append(replace(node, inputs=inputs, outputs=outputs))
                continue
            if node.op not in EXPANSIONS or node.domain:
                raise ModelError(f"node {node.name!r}: {node.op} holds a subgraph, which is not supported")
            self.count += 1
            EXPANSIONS[node.op](self, replace(node, inputs=inputs, outputs=outputs), bodies, names)

    def append(self, node: Node) -> None:
        """Append a node without subgraphs, and record its outputs in ``known`` if they are small constants.
        `ModelError` above `MAX_NODES`."""
        if len(self.nodes) >= MAX_NODES:
            raise ModelError(
                f"node {node.name!r}: its unrolled loops have more than {MAX_NODES} nodes, the most allowed"
            )
        self.nodes.append(replace(node, name=f"{node.name}.{len(self.nodes)}") if self.count else node)
        results = self._results(node)
        for name, array in zip(node.outputs, results or (), strict=False):
            if name and array.size <= MAX_ELEMENTS:
                self.known[name] = array
        if node.op == "Identity" and node.inputs[0] in self.shapes:
            self.shapes[node.outputs[0]] = self.shapes[node.inputs[0]]

    def _results(self, node: Node) -> tuple[np.ndarray, ...] | None:
        """Return a node's outputs if they follow from ``known`` values or ``shapes``; else None."""
        if node.domain:
            return None
        if node.op == "Constant":
            value = constant_value(node)
            return None if value is None else (value,)
        if node.op == "Identity":
            return (self.known[node.inputs[0]],) if node.inputs[0] in self.known else None
        if node.op in ("Shape", "Size") and node.inputs[0] in self.shapes:
            dims = np.asarray(self.shapes[node.inputs[0]], np.int64)
            if node.op == "Size":
                return (np.asarray(math.prod(dims.tolist()), np.int64),)
            start, end = (node.attributes.get(k, d) for k, d in (("start", 0), ("end", len(dims))))
            return (dims[start:end],)
        return fold(node, self.known)

    # -------------------------------------------------------------- pieces that the expansions are made of

    def inline(
        self, node: Node, body: Body, arguments: Mapping[str, str], names: Mapping[str, str]
    ) -> list[str]:
        """Append a subgraph's nodes once, with new names for what they write, and return the names of its outputs.
        ``arguments``: by its inputs, the values that they get. ``names``: the new graph's
        name for each value whose name changes."""
        self.fresh += 1
        inner = {**names, **arguments}
        # The same names in all calls: all iterations read the same weights.
        for name, array in body.initialisers.items():
            inner[name] = f"{node.name}/{name}"
            if inner[name] not in self.initialisers:
                self.initialisers[inner[name]] = replace(array, name=inner[name])
                self.shapes[inner[name]] = array.shape
                self.learn(self.initialisers[inner[name]])
        for inside in body.nodes:
            inner.update((o, f"{o}/{self.fresh}") for o in inside.outputs if o)
        self.walk(body.nodes, inner)
        return [inner.get(o, o) for o in body.outputs]

    def constant(self, name: str, value: np.ndarray) -> str:
        self.initialisers[name] = Array.of(name, value)
        self.known[name] = value
        return name

    def emit(self, node: Node, op: str, inputs: Sequence[str], output: str, **attributes: Any) -> str:
        version = max(PLAIN, node.version)
        self.append(Node(f"{node.name}.{op}", op, "", version, tuple(inputs), (output,), attributes))
        return output

    def value(self, node: Node, name: str, what: str) -> np.ndarray:
        if name not in self.known:
            raise ModelError(
                f"node {node.name!r}: its {what} ({name!r}) depends on data; {node.op} cannot be planned"
            )
        return self.known[name]

    def scalar(self, node: Node, name: str, what: str) -> int:
        """Return the value ``name`` as an integer; `ModelError` if the value is not known, or no single integer.
        ``what``: its purpose, for messages."""
        value = self.value(node, name, what)
        if value.size != 1 or value.dtype.kind not in "biu":
            raise ModelError(
                f"node {node.name!r}: its {what} ({name!r}) is not a single whole number or truth value"
            )
        return int(value.ravel()[0])

    def stacked(self, node: Node, parts: Sequence[str], axis: int, output: str) -> None:
        """Append nodes that stack the values ``parts``, one per iteration, along a new axis."""
        axes = self.constant(f"{output}.axes", np.asarray([axis], np.int64))
        rows = [self.emit(node, "Unsqueeze", (p, axes), f"{output}.{k}") for k, p in enumerate(parts)]
        self.emit(node, "Concat", rows, output, axis=axis)

    def check(self) -> None:
        """Raise `ModelError` unless every value that a node of the new graph reads is an input, stored, or written by
        a node."""
        written = {o for n in self.nodes for o in n.outputs} | self.initialisers.keys()
        written |= {v.name for v in self.draft.inputs} | {""}
        for node in self.nodes:
            for name in node.inputs:
                if name not in written:
                    raise ModelError(f"node {node.name!r} ({node.op}) reads {name!r}, which nothing writes")


# ------------------------------------------------------------------ the ops


def _if(work: _Unrolling, node: Node, bodies: Mapping[str, Body], names: Mapping[str, str]) -> None:
    holds = work.scalar(node, node.inputs[0], "condition")
    body = _body(node, bodies, "then_branch" if holds else "else_branch", 0, len(node.outputs))
    for result, output in zip(work.inline(node, body, {}, names), node.outputs, strict=False):
        if output:
            work.emit(node, "Identity", (result,), output)


def _body(node: Node, bodies: Mapping[str, Body], name: str, inputs: int, outputs: int) -> Body:
    """Return the subgraph in the attribute ``name`` of a node; `ModelError` if it is missing, has another number of
    inputs, or too few outputs.

    ``bodies``: the node's subgraphs by attribute.
    """
    body = bodies.get(name)
    if body is None:
        raise ModelError(f"node {node.name!r} ({node.op}) has no {name}")
    if len(body.inputs) != inputs or len(body.outputs) < outputs:
        found = f"{len(body.inputs)} inputs and {len(body.outputs)} outputs, not {inputs} and {outputs}"
        raise ModelError(f"node {node.name!r} ({node.op}): its {name} has {found}")
    return body


def _loop(work: _Unrolling, node: Node, bodies: Mapping[str, Body], names: Mapping[str, str]) -> None:
    """Unroll a Loop: the body runs as long as condition and count say, and its further results are stacked.
    `ModelError` if condition or count are not known, or beyond `MAX_ITERATIONS`."""
    count, condition, *states = (*node.inputs, "", "")[: max(2, len(node.inputs))]
    made = max(len(node.outputs), len(states))
    body = _body(node, bodies, "body", 2 + len(states), 1 + made)
    iterations = MAX_ITERATIONS + 1 if not count else work.scalar(node, count, "trip count")
    go = not condition or bool(work.scalar(node, condition, "condition"))
    counts = bool(count and not condition)  # if True, the body's condition is ignored
    kept: list[list[str]] = []
    iteration = 0
    begun = work.constant(f"{node.name}.{work.fresh}.go", np.asarray(True))
    while go and iteration < iterations:
        if iteration >= MAX_ITERATIONS or (counts and iterations > MAX_ITERATIONS):
            raise ModelError(
                f"node {node.name!r}: the Loop runs more than {MAX_ITERATIONS} times, the most that are unrolled"
            )
        number = work.constant(f"{node.name}.{work.fresh}.turn", np.asarray(iteration, np.int64))
        begin = (number, begun, *states)
        again, *results = work.inline(node, body, dict(zip(body.inputs, begin, strict=True)), names)
        go = counts or bool(work.scalar(node, again, "condition"))
        states, iteration = results[: len(states)], iteration + 1
        kept.append(results[len(states) :])
    _finish(work, node, states, kept, [0] * (len(node.outputs) - len(states)))


def _finish(
    work: _Unrolling, node: Node, states: Sequence[str], kept: Sequence[Sequence[str]], axes: Sequence[int]
) -> None:
    """Append nodes that write the outputs of a Loop or Scan: the last ``states``, then the results of all iterations
    (``kept``), stacked along ``axes``. `ModelError` if there were none to stack."""
    for result, output in zip(states, node.outputs, strict=False):
        if output:
            work.emit(node, "Identity", (result,), output)
    for k, output in enumerate(node.outputs[len(states) :]):
        if output and not kept:
            raise ModelError(f"node {node.name!r}: the {node.op} never runs, so {output!r} has no shape")
        if output:
            work.stacked(node, [values[k] for values in kept], axes[k], output)


def _scan(work: _Unrolling, node: Node, bodies: Mapping[str, Body], names: Mapping[str, str]) -> None:
    """Unroll a Scan: its body runs once for each slice of the scanned inputs; its further results are stacked.
    `ModelError` if their length is not known or inputs do not fit."""
    if node.version < 9:
        raise ModelError(f"node {node.name!r}: Scan of opset {node.version} is not supported")
    scanned = int(node.attributes.get("num_scan_inputs", 0))  # type: ignore[arg-type]
    at = len(node.inputs) - scanned
    outputs = len(node.outputs) - at
    if scanned < 1 or at < 0 or outputs < 0 or not all(node.inputs):
        raise ModelError(
            f"node {node.name!r}: {scanned} of {len(node.inputs)} inputs scanned do not fit a Scan"
        )
    body = _body(node, bodies, "body", len(node.inputs), len(node.outputs))
    states, sources = list(node.inputs[:at]), node.inputs[at:]
    axes, back = (_each(node, f"scan_input_{k}", scanned) for k in ("axes", "directions"))
    out_axes, out_back = (_each(node, f"scan_output_{k}", outputs) for k in ("axes", "directions"))
    iterations = _length(work, node, sources, axes)
    kept: list[list[str]] = []
    for iteration in range(iterations):
        picked: list[str] = []
        for source, axis, reverse in zip(sources, axes, back, strict=True):
            mark = f"{node.name}.{work.fresh}.{len(picked)}"
            place = work.constant(
                f"{mark}.at", np.asarray(iterations - 1 - iteration if reverse else iteration, np.int64)
            )
            picked.append(work.emit(node, "Gather", (source, place), f"{mark}.picked", axis=axis))
        arguments = dict(zip(body.inputs, (*states, *picked), strict=True))
        results = work.inline(node, body, arguments, names)
        states = results[:at]
        kept.append(results[at:])
    ordered = [[kept[-1 - i if out_back[k] else i][k] for k in range(outputs)] for i in range(iterations)]
    _finish(work, node, states, ordered, out_axes)


def _each(node: Node, name: str, count: int) -> tuple[int, ...]:
    stated: Any = node.attributes.get(name) or (0,) * count
    if len(stated) != count:
        raise ModelError(f"node {node.name!r}: {name} has {len(stated)} numbers, not {count}")
    return tuple(int(v) for v in stated)


def _length(work: _Unrolling, node: Node, sources: Sequence[str], axes: Sequence[int]) -> int:
    """Return the iterations of a Scan, the common length of ``sources`` along ``axes``; `ModelError` if unknown,
    different, or above `MAX_ITERATIONS`."""
    lengths = set()
    for source, axis in zip(sources, axes, strict=True):
        shape = work.shapes.get(source)
        if shape is None:
            raise ModelError(f"node {node.name!r}: the length of its input {source!r} is not known at load")
        if not -len(shape) <= axis < len(shape):
            raise ModelError(f"node {node.name!r}: its input {source!r} has no axis {axis}")
        lengths.add(shape[axis])
    if len(lengths) != 1 or max(lengths) > MAX_ITERATIONS:
        raise ModelError(f"node {node.name!r}: it scans inputs of lengths {sorted(lengths)}")
    return int(lengths.pop())


EXPANSIONS = {"If": _if, "Loop": _loop, "Scan": _scan}
