"""What each input and output of a joint fx graph is: a parameter, a buffer, a tangent, a gradient and so on, and of
what."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import fx

from rematplan.ir import ModelError
from rematplan.runtime.graph.captured_step import InputKind, OutputKind, in_model

MUTATED = "InputMutationAOTOutput"
"""The name of the tracer's class for outputs that are an input's new content."""
COPY = torch.ops.aten.copy_.default


class ModuleRoles:
    """Says what each input and output of a module's joint graph is, from the tracer's descriptions. ``names``: the
    module's names by the tracer's. ``outputs``: the number of the module's outputs; further ones are checks."""

    def __init__(self, names: Mapping[str, str], outputs: int) -> None:
        self.names, self.outputs = names, outputs

    def input(self, node: fx.Node, at: int) -> tuple[InputKind, str]:
        """Return an input's kind and target: a parameter's or buffer's name, a batch position, or the output that a
        tangent is of."""
        del at
        kind, target = _describe_input(node.meta["desc"], self.names)
        return kind, self.names.get(target, target) if kind in ("parameter", "buffer") else target

    def output(self, at: int, description: Any) -> tuple[OutputKind, str] | None:
        """Return an output's kind and target: the position of an output or input, or the name of a parameter or buffer;
        None if not needed. `ModelError` if the output is the new content of an input of the batch."""
        del at
        found = _describe_output(description, self.names)
        if found is None:
            return None
        kind, target = found
        if kind == "output" and int(target) >= self.outputs:
            kind = "check"
        return kind, self.names.get(target, target) if kind in ("gradient", "buffer") else target


class PositionRoles:
    """The roles of inputs and outputs by position. Inputs with new content count as buffers; results from position
    ``early`` on are gradients."""

    def __init__(self, module: fx.GraphModule, early: int) -> None:
        self.early = early
        self.renewed = {n.args[0] for n in module.graph.find_nodes(op="call_function", target=COPY)}
        described = module.graph.find_nodes(op="output")[0].meta.get("desc") or ()
        self.at = {d.mutated_input.idx for d in described if type(d).__name__ == MUTATED}

    def input(self, node: fx.Node, at: int) -> tuple[InputKind, str]:
        """Return the kind of the input at a position, and the position as text."""
        if "tangents" in node.name:
            return "tangent", str(at)
        return ("buffer" if node in self.renewed or at in self.at else "batch"), str(at)

    def output(self, at: int, description: Any) -> tuple[OutputKind, str] | None:
        """Return the kind of the output at a position, and its position among the outputs or among the gradients."""
        if at >= self.early:
            return "input gradient", str(at - self.early)
        return ("renewed" if type(description).__name__ == MUTATED else "output"), str(at)


def _describe_input(description: Any, names: Mapping[str, str]) -> tuple[InputKind, str]:
    """Return an input's kind, and its name or position as text. `ModelError` for the gradient of an input that the
    forward changes in place."""
    kind = type(description).__name__
    if kind == "ParamAOTInput":
        return "parameter", description.target
    if kind == "BufferAOTInput":
        return "buffer", description.target
    if kind == "TangentAOTInput":
        if type(description.output).__name__ == MUTATED:
            raise _in_place(description.output, names)
        return "tangent", str(description.output.idx)
    return "batch", str(description.idx)


def _describe_output(description: Any, names: Mapping[str, str]) -> tuple[OutputKind, str] | None:
    """Return an output's kind, and its name or position as text; None if it is of no known kind. `ModelError` for the
    new content of an input of the batch."""
    kind = type(description).__name__
    if kind == "PlainAOTOutput":
        return "output", str(description.idx)
    if kind == MUTATED:
        if not hasattr(description.mutated_input, "target"):
            raise _in_place(description, names)
        return "buffer", description.mutated_input.target
    if kind == "GradAOTOutput":
        of = description.grad_of
        return ("gradient", of.target) if hasattr(of, "target") else ("input gradient", str(of.idx))
    return None


def _in_place(mutation: Any, names: Mapping[str, str]) -> ModelError:
    """Return the error for a forward that changes an input or a parameter in place."""
    place = mutation.mutated_input
    if not hasattr(place, "target"):
        return ModelError(f"the model changes its input {place.idx} in place")
    name = in_model(names.get(place.target, place.target))
    return ModelError(
        f"the forward changes the parameter {name} in place (as an embedding with max_norm does), which a plan cannot "
        f"contain; change it between steps"
    )
