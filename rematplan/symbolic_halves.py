"""The forward and the backward graph of a joint graph with symbolic sizes, with nodes that compute these sizes."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, TypeAlias

import torch
from torch import fx
from torch.fx.node import map_aggregate

from rematplan.planner.core.schedule import Schedule
from rematplan.runtime.capture.read_fx import read_flat_joint_graph
from rematplan.runtime.execute.fx_graphs import PlanGraphs, plan_graphs
from rematplan.runtime.symbols.expressions import ExpressionTable, NotSymbolic, OpenSize
from rematplan.runtime.symbols.symbolic_step import OpenStep

Halves: TypeAlias = tuple[fx.GraphModule, fx.GraphModule]


class SymbolicJointGraph:
    """A joint graph (forward and backward) with symbolic sizes, from which a captured step and both halves' graphs
    are made.

    ``outputs``: the number of its results that the forward returns.
    """

    def __init__(self, joint: fx.GraphModule, outputs: int, symbols: Sequence[str], name: str) -> None:
        self.joint, self.outputs = joint, outputs
        self.table = ExpressionTable(tuple(symbols))
        self.step = read_flat_joint_graph(joint, outputs, name, self.table)

    def opened(self) -> OpenStep:
        """Return the step as a function of its symbolic sizes."""
        return OpenStep.of_graph(self.step, self.table)

    def halves(self, schedule: Schedule) -> Halves:
        """Return the graphs of forward and backward that follow a schedule. The forward returns the symbolic sizes
        last, and the backward takes them first; `NotSymbolic` if a size is that of no input."""
        graphs = plan_graphs(self.step, schedule)
        results: Any = self.joint.graph.find_nodes(op="output")[0].args[0]
        forward = _SizeNodes(self.joint, self.table, graphs.forward, give_sizes(graphs.forward, self.joint))
        sizes = {node.name: forward.node(node) for node in results if _is_size(node)}
        forward.fill()
        backward = _SizeNodes(self.joint, self.table, graphs.backward, _sizes_first(graphs, self.joint))
        gradients = {node.name: backward.node(node) for node in results if _is_size(node)}
        backward.fill()
        fill(graphs.forward, results[: self.outputs], sizes, tuple(forward.given.values()))
        fill(graphs.backward, results[self.outputs :], gradients)
        return graphs.forward, graphs.backward


class _SizeNodes:
    """The nodes that compute symbolic sizes in one half of a joint graph.

    ``given``: the half's inputs that are sizes, by the name of the joint graph's input.
    """

    def __init__(
        self, joint: fx.GraphModule, table: ExpressionTable, module: fx.GraphModule, given: dict[str, fx.Node]
    ) -> None:
        self.table, self.module, self.given = table, module, given
        self.made: dict[str, fx.Node] = dict(given)
        sizes = [node for node in joint.graph.nodes if _is_size(node)]
        self.of = {node.meta["val"].node.expr: node for node in reversed(sizes)}
        self.first = next(node for node in module.graph.nodes if node.op != "placeholder")

    def node(self, of: fx.Node) -> fx.Node:
        """Return this half's node that computes the size of the joint graph's node ``of``; it is added if there is
        none. `NotSymbolic` if the size is that of another tensor than an input."""
        of = self.of.get(of.meta["val"].node.expr, of)
        found = self.made.get(of.name)
        if found is None:
            if of.op != "call_function" or not all(map(_is_size, of.all_input_nodes)):
                raise NotSymbolic("it reads a size of a tensor that is none of its inputs")
            args = map_aggregate(of.args, lambda a: self.node(a) if isinstance(a, fx.Node) else a)
            with self.module.graph.inserting_before(self.first):
                found = self.module.graph.call_function(of.target, args)  # type: ignore[arg-type]
            found.meta["val"] = of.meta["val"]
            self.made[of.name] = found
        return found

    def fill(self) -> None:
        """Replace each symbolic size among the arguments of the half's calls by the node that computes it."""
        by_place = {at: expression for expression, at in self.table.expressions.items()}

        def filled(a: Any) -> Any:
            return self.node(self.of[by_place[a.at]]) if isinstance(a, OpenSize) else a

        for node in list(self.module.graph.nodes):
            node.args = map_aggregate(node.args, filled)
            node.kwargs = map_aggregate(node.kwargs, filled)


def give_sizes(module: fx.GraphModule, joint: fx.GraphModule) -> dict[str, fx.Node]:
    """Add the symbolic sizes among a joint graph's inputs to those of its forward graph, in place. Return the new
    nodes, by the name of the joint graph's input."""
    own = iter(module.graph.nodes)
    here, given = next(own), {}
    for node in joint.graph.find_nodes(op="placeholder"):
        if isinstance(node.meta["val"], torch.SymInt):
            with module.graph.inserting_before(here):
                given[node.name] = module.graph.placeholder(node.name)
            given[node.name].meta["val"] = node.meta["val"]
        elif here.op == "placeholder":
            here = next(own)
    return given


def fill(
    module: fx.GraphModule, results: Sequence[Any], sizes: Mapping[str, fx.Node], more: Sequence[fx.Node] = ()
) -> None:
    """Insert the results of a joint graph that are no tensors (sizes and constants) into a half's outputs, in place,
    and append ``more``. ``sizes``: the half's nodes of sizes, by the joint graph's names."""
    output = module.graph.find_nodes(op="output")[0]
    given = iter(output.args[0])

    def filled(result: Any) -> Any:
        if not isinstance(result, fx.Node):
            return result
        return sizes[result.name] if result.name in sizes else next(given)

    output.args = ((*map(filled, results), *given, *more),)
    module.recompile()


def _sizes_first(graphs: PlanGraphs, joint: fx.GraphModule) -> dict[str, fx.Node]:
    graph, given = graphs.backward.graph, {}
    first = next(iter(graph.nodes))
    for node in filter(_is_size, joint.graph.find_nodes(op="placeholder")):
        with graph.inserting_before(first):
            given[node.name] = graph.placeholder(node.name)
        given[node.name].meta["val"] = node.meta["val"]
    return given


def _is_size(node: Any) -> bool:
    return isinstance(node, fx.Node) and isinstance(node.meta.get("val"), torch.SymInt)
