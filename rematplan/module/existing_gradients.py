"""The gradients of earlier steps that exist when a call begins. They are resident during the whole step."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass

import torch

from rematplan.runtime.graph.allocator_rounding import allocated


@dataclass(frozen=True)
class ExistingGradients:
    """The gradients of earlier steps that exist now."""

    names: frozenset[str]
    """The parameters to whose gradients new ones will be added."""
    bytes: int
    """The allocated bytes of these gradients, of the gradients of inputs, and of summed statistics."""


def existing_gradients(
    first: torch.Tensor | None,
    named: Mapping[str, torch.Tensor],
    inputs: Sequence[torch.Tensor],
    summed: Collection[int],
) -> ExistingGradients | None:
    """Return the gradients of earlier steps that exist now. None if the parameter ``first``, which decides for all
    parameters, and all ``inputs`` have none, and ``summed`` (bytes of statistics) is empty."""
    of_inputs = [g for t in inputs if (g := gradient_storage(t)) is not None]
    # Looking at one parameter is fast.
    if gradient_storage(first) is None and not of_inputs and not summed:
        return None
    gradients = {name: g for name, t in named.items() if (g := gradient_storage(t)) is not None}
    every = (*gradients.values(), *of_inputs)
    held = sum({g._cdata: allocated(g.nbytes(), g.device) for g in every}.values()) + sum(summed)
    return ExistingGradients(frozenset(gradients), held)


def gradient_storage(tensor: torch.Tensor | None) -> torch.UntypedStorage | None:
    """Return the storage of a tensor's gradient. Return None if the tensor is no leaf that requires a gradient, or has
    no dense gradient."""
    if tensor is None or not (tensor.requires_grad and tensor.is_leaf):
        return None
    gradient = tensor.grad
    dense = type(gradient) is torch.Tensor and gradient.layout is torch.strided
    return gradient.untyped_storage() if gradient is not None and dense else None
