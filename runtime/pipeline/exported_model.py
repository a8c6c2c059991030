"""Export a model's forward as ATen calls for stages; a model that stages would compute otherwise is refused."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import fx, nn
from torch.fx.traceback import preserve_node_meta

from rematplan.ir import ModelError, first_line
from rematplan.runtime.capture.capture import check_traceable
from rematplan.runtime.capture.patches.checkpoint import without_checkpoints
from rematplan.runtime.capture.patches.saved_tensors import no_saved_tensors_hooks
from rematplan.runtime.capture.patches.trace_costs import no_collection
from rematplan.runtime.capture.unrepeatable_draws import no_host_draws
from rematplan.runtime.graph.compat import pytree
from rematplan.runtime.pipeline.export_regions import without_regions
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
            no_collection(),
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
