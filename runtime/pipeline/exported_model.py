"""Export a model's forward as ATen calls for stages; a model that stages would compute otherwise is refused."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, cast

import torch
from torch import fx, nn
from torch.fx.traceback import preserve_node_meta

from rematplan.ir import ModelError, first_line
from rematplan.runtime.capture.capture import check_traceable
from rematplan.runtime.capture.patches.checkpoint import without_checkpoints
from rematplan.runtime.capture.patches.saved_tensors import no_saved_tensors_hooks
from rematplan.runtime.capture.patches.trace_costs import only_what_is_read
from rematplan.runtime.capture.unrepeatable_draws import no_host_draws
from rematplan.runtime.graph.compat import HigherOrderOperator, pytree
from rematplan.runtime.pipeline.unrecorded import (
    Numbers,
    check_numbers,
    refuse_unrecorded_backwards,
    watched_attributes,
)

RESERVED = frozenset(name for name in dir(fx.GraphModule) if not hasattr(nn.Module, name))
"""Names of a graph module's own attributes, such as ``code``, which a model's parts cannot have in a stage."""


def exported(model: nn.Module, args: Sequence[Any], kwargs: Mapping[str, Any]) -> fx.Graph:
    """Return the model's forward for these arguments as ATen calls; `ModelError` if it cannot be cut into stages."""
    check_traceable(model)
    states = (*model.named_parameters(), *model.named_buffers())
    if taken := RESERVED.intersection(name.partition(".")[0] for name, _ in states):
        raise ModelError(
            f"{type(model).__name__} has an attribute called {min(taken)}, as PyTorch's graph modules have; rename it"
        )
    program, numbers = _program(model, args, kwargs)
    check_numbers(model, numbers, program.graph, lambda: _program(model, args, kwargs)[0].graph)
    module = program.module()
    assert isinstance(module, fx.GraphModule)
    _check_results(module.graph, program.module_call_graph[0].signature.out_spec, type(model).__name__)
    return without_regions(module, type(model).__name__)


def _program(
    model: nn.Module, args: Sequence[Any], kwargs: Mapping[str, Any]
) -> tuple[torch.export.ExportedProgram, Numbers]:
    """Return a model's exported forward, and the numbers that it assigns to attributes; `ModelError` if it cannot be
    exported."""
    name = type(model).__name__
    try:
        with (
            no_host_draws(f"{name} cannot be cut into stages"),
            watched_attributes(model) as numbers,
            refuse_unrecorded_backwards(model),
            preserve_node_meta(),
            only_what_is_read(),
            without_checkpoints(),
            no_saved_tensors_hooks(f"{name} cannot be cut into stages"),
        ):
            return torch.export.export(model, tuple(args), dict(kwargs)), numbers
    except ModelError:
        raise
    except Exception as error:  # any error in the user's model is reported in one line
        reason = first_line(error)
        raise ModelError(
            f"{name} cannot be cut into stages: its forward cannot be exported: {reason}"
        ) from error


def _check_results(graph: fx.Graph, spec: pytree.TreeSpec, model: str) -> None:
    """Raise `ModelError` for a model whose result is neither a tensor nor a flat tuple or list of different tensors."""
    results = pytree.tree_leaves(graph.output_node().args[0])
    tensors = [one for one in results if isinstance(one, fx.Node)]
    alone, kind = spec.is_leaf(), getattr(spec.type, "__name__", "")
    faults = {
        "a number or None": alone and not tensors,
        f"a {kind}": not alone and spec.type not in (tuple, list),
        f"a nested {kind}": not all(c.is_leaf() for c in spec.children()),
        f"a {kind} with numbers or None": len(tensors) < len(results),
        f"a {kind} with the same tensor twice": len({*tensors}) < len(tensors),
    }
    for fault, has in faults.items():
        if has:
            raise ModelError(
                f"{model} returns {fault}; a pipeline needs a tensor or a tuple of different tensors"
            )


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
