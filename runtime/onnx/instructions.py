"""The nodes of an ONNX graph as instructions, in the order in which they run."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from rematplan.ir.onnx.graph import Graph, Node, Weight
from rematplan.ir.onnx.weight_roles import differentiated, trains_statistics
from rematplan.runtime.onnx.op_table import row_of
from rematplan.runtime.onnx.ops.rows import Row, refuse


@dataclass(frozen=True, slots=True)
class Instruction:
    """One node of an ONNX graph, ready to run."""

    node: Node
    """The node."""
    row: Row
    """The op table's entry for its op and opset, with the function to call."""
    last: tuple[str, ...]
    """The values, neither outputs nor weights, that no later node reads; they are freed after the node."""
    statistics: tuple[tuple[int, str], ...]
    """For a batch norm in training form: pairs of an output's position and the buffer whose content it replaces."""
    inner: tuple[Instruction, ...] = ()
    """For a Gradient node: the instructions that compute the differentiated value from the node's inputs."""

    @classmethod
    def of(cls, node: Node) -> Instruction:
        """Return the instruction of a single node that frees none of its inputs."""
        return cls(node, row_of(node), (), ())


def program_of(graph: Graph) -> tuple[Instruction, ...]:
    """Return the nodes as instructions, each with the values, neither outputs nor weights, that no later node reads;
    `ModelError` for an unknown op."""
    rows = [row_of(node) for node in graph.nodes]
    kept = {o.name for o in graph.outputs} | {w.name for w in graph.weights}
    seen: set[str] = set()
    program = []
    for node, row in zip(reversed(graph.nodes), reversed(rows), strict=True):
        names = dict.fromkeys(n for n in node.inputs if n and n not in seen and n not in kept)
        seen.update(names)
        inner = _inner(graph, node) if node.op == "Gradient" else ()
        program.append(Instruction(node, row, tuple(names), _statistics(node, graph.weights), inner))
    return tuple(reversed(program))


def _inner(graph: Graph, gradient: Node) -> tuple[Instruction, ...]:
    """Return the nodes that compute a Gradient node's ``y`` from its inputs. `ModelError` if there are none, or if they
    also need other inputs of the graph."""
    names = differentiated(gradient)
    inner = {*names.xs, *names.zs}
    needed, chosen = {names.y}, []
    for node in reversed(graph.nodes):
        if node is not gradient and needed.intersection(node.outputs):
            chosen.append(node)
            needed.update(set(node.inputs) - inner)
    missing = {v.name for v in graph.inputs} & needed
    if missing or not chosen:
        raise refuse(gradient, f"{names.y!r} is not computed from {sorted(inner)} alone")
    return tuple(
        Instruction(n, row_of(n), (), (), _inner(graph, n) if n.op == "Gradient" else ())
        for n in reversed(chosen)
    )


def _statistics(node: Node, weights: Iterable[Weight]) -> tuple[tuple[int, str], ...]:
    """Return which results of a batch norm in training form are new contents of buffers."""
    if node.op != "BatchNormalization" or not trains_statistics(node):
        return ()
    buffers = {w.name for w in weights if w.role == "buffer"}
    return tuple((out, node.inputs[at]) for out, at in ((1, 3), (2, 4)) if node.inputs[at] in buffers)
