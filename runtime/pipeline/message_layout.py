"""How a stage sends a tensor that is not contiguous without copying it: as a view in the order of the memory.

The receiver permutes the view again, so that ops see the strides of the whole model. A gradient, whose strides may
be others, is sent with its elements in their own order.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from rematplan.runtime.graph.storage_slices import is_plain

FORMATS = {4: torch.channels_last, 5: torch.channels_last_3d}
"""By the number of dimensions, the memory formats that gradients share with their tensors."""


def memory_order(like: torch.Tensor) -> list[int] | None:
    """Return a dense tensor's dimensions from the largest stride to the smallest; None if contiguous or not dense."""
    if is_plain(like):
        return None
    order = sorted(range(like.dim()), key=lambda d: -like.stride()[d])
    return order if like.permute(order).is_contiguous() else None


def inverse(order: Sequence[int]) -> list[int]:
    """Return the order of dimensions that undoes ``order``."""
    return sorted(range(len(order)), key=order.__getitem__)


def keeps_format(like: torch.Tensor) -> bool:
    """Return whether the gradient of a tensor like this is expected to have the tensor's strides."""
    memory_format = FORMATS.get(like.dim())
    return memory_format is not None and like.is_contiguous(memory_format=memory_format)


def turned(tensor: torch.Tensor, order: Sequence[int]) -> torch.Tensor:
    """Return a view with the dimensions in another order. Its gradient becomes the tensor's without being permuted."""
    # Gradients are right only if the next stage undoes the order by this function, too.
    result: torch.Tensor = _Turned.apply(tensor, order)
    return result


class _Turned(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, tensor: torch.Tensor, order: Sequence[int]) -> torch.Tensor:
        ctx.shape = tensor.shape
        return tensor.permute(list(order))

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> Any:
        return gradient.contiguous().view(ctx.shape), None
