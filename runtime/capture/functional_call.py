"""Have a module compute with other tensors instead of its parameters and buffers."""

from __future__ import annotations

from contextlib import AbstractContextManager

import torch
from torch import nn

from rematplan.runtime.graph.compat import reparametrize_module


def slots(module: nn.Module) -> dict[str, torch.Tensor]:
    """Return a module's parameters and buffers by the qualified name of each attribute that has one: several for a
    tied tensor."""
    return {
        f"{path}.{name}" if path else name: tensor
        # A submodule with several names counts under the first: `replaced` would replace its tensors
        # twice and restore them once.
        for path, owner in module.named_modules()
        for name, tensor in (*owner._parameters.items(), *owner._buffers.items())
        if tensor is not None
    }


def replaced(module: nn.Module, tensors: dict[str, torch.Tensor]) -> AbstractContextManager[None]:
    """Return a context in which a module has other tensors instead of its parameters and buffers. Afterwards it has its
    own again, and ``tensors`` those that it had at the end."""
    context: AbstractContextManager[None] = reparametrize_module(module, tensors)
    return context
