"""Losses that keep no more bytes than their own value."""

from __future__ import annotations

from collections.abc import Callable
from functools import wraps
from typing import Any, TypeAlias

import torch

LossFunction: TypeAlias = Callable[..., torch.Tensor]
"""A function from the outputs and the targets of a micro-batch to a scalar."""


def with_own_storage(loss_fn: LossFunction) -> LossFunction:
    """Return a function that computes the same loss, in a storage that holds nothing else.

    A pipeline keeps the loss of each micro-batch to the end of a step. The result of `mse_loss`, or a view of a larger
    tensor, would keep a storage of the outputs' size for as long.
    """

    @wraps(loss_fn)
    def compute(*args: Any, **kwargs: Any) -> torch.Tensor:
        loss = loss_fn(*args, **kwargs)
        return loss.clone() if loss.untyped_storage().nbytes() > loss.nbytes else loss

    return compute
