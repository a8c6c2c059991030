"""Replace an exported graph's regions under `torch.no_grad` by their ops: a pipeline cuts a flat graph."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, cast

import torch
from torch import fx

from rematplan.ir import ModelError
from rematplan.runtime.graph.compat import HigherOrderOperator

NO_GRAD = "wrap_with_set_grad_enabled"
"""The name of the call that runs a region in which gradients are switched off, or on again."""

CHECK = torch.ops.aten._assert_tensor_metadata.default
"""An op by which an exported graph checks the type of a tensor that it converts. It has no result."""


def without_regions(module: fx.GraphModule, model: str) -> fx.Graph:
    """Inline the `torch.no_grad` regions in the graph of ``module`` in place, remove its checks of types, and return
    it. `ModelError` for a region of another kind. The ops read detached tensors, but buffers as they are, because ops
    may write them."""
    graph = module.graph
    for node in graph.find_nodes(op="call_function", target=CHECK):
        graph.erase_node(node)
    for node in list(graph.nodes):
        if node.op != "call_function" or not isinstance(node.target, HigherOrderOperator):
            continue
        if node.target.name() != NO_GRAD or node.args[0]:
            raise ModelError(
                f"{model} cannot be cut into stages: its forward has a region of {node.target.name()}, "
                f"which runs as a whole"
            )
        _inline(module, node, without_regions(getattr(module, node.args[1].target), model))
    return graph


def _inline(module: fx.GraphModule, region: fx.Node, inner: fx.Graph) -> None:
    """Put the ops of ``inner`` in place of ``region``, a node of the graph of ``module`` that calls them."""
    ops = [node for node in inner.nodes if node.op not in ("placeholder", "output")]
    called, arguments = region.args[1], region.args[2:]
    with module.graph.inserting_before(region):
        copies = {
            place: _detached(module, argument, ops[0] if ops else region)
            for place, argument in zip(inner.find_nodes(op="placeholder"), arguments, strict=True)
        }
        for node in ops:
            copies[node] = module.graph.node_copy(node, copies.__getitem__)
    results = inner.output_node().args[0]
    assert isinstance(called, fx.Node)
    assert isinstance(results, Sequence)
    for user in list(region.users):  # each takes one of the results
        result = results[cast(int, user.args[1])]
        user.replace_all_uses_with(copies[result])
        module.graph.erase_node(user)
    module.graph.erase_node(region)
    module.graph.erase_node(called)


def _detached(module: fx.GraphModule, argument: Any, before: fx.Node) -> Any:
    """Return a new node that detaches ``argument``, with the module names of the node ``before``. Arguments that are no
    tensors, and stored tensors without a gradient, are returned as they are."""
    if not isinstance(argument, fx.Node) or not isinstance(argument.meta.get("val"), torch.Tensor):
        return argument
    if argument.op == "get_attr" and not argument.meta["val"].requires_grad:
        return argument
    made = module.graph.call_function(torch.ops.aten.detach.default, (argument,))
    made.meta = before.meta | {"val": argument.meta["val"]}
    return made
