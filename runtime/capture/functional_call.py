"""A module called with other tensors in the place of its own."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import nn
from torch.func import functional_call


def slots(module: nn.Module) -> dict[str, torch.Tensor]:
    """Parameters and buffers by the place that holds them, each place once.

    A tied tensor has several places. A module that has several names has its tensors in one place all the same: were
    each name given a tensor, `functional_call` would put it there twice and leave the second behind.
    """
    return {
        f"{path}.{name}" if path else name: tensor
        for path, owner in module.named_modules()
        for name, tensor in (*owner._parameters.items(), *owner._buffers.items())
        if tensor is not None
    }


def call_with(module: nn.Module, tensors: dict[str, torch.Tensor], batch: Sequence[torch.Tensor]) -> Any:
    """The module's outputs with these tensors, by `slots`. Its own are left as they are, in content and in place.

    Where its forward assigns another tensor to such a place, ``tensors`` then has that one.
    """
    return functional_call(module, tensors, tuple(batch), tie_weights=False)
