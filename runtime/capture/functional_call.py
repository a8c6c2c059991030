"""Call a module with other tensors instead of its parameters and buffers."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import nn
from torch.func import functional_call


def slots(module: nn.Module) -> dict[str, torch.Tensor]:
    """Return a module's parameters and buffers by the qualified name of each attribute that has one: several for a
    tied tensor."""
    return {
        f"{path}.{name}" if path else name: tensor
        # A submodule with several names counts under the first: `functional_call` would replace its tensors
        # twice and restore them once.
        for path, owner in module.named_modules()
        for name, tensor in (*owner._parameters.items(), *owner._buffers.items())
        if tensor is not None
    }


def call_with(module: nn.Module, tensors: dict[str, torch.Tensor], batch: Sequence[torch.Tensor]) -> Any:
    """Call a module with other tensors instead of its parameters and buffers, and return its outputs. The module is
    left unchanged."""
    return functional_call(module, tensors, tuple(batch), tie_weights=False)
