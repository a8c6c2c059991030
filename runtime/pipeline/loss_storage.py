"""Losses that keep no more bytes than their own value."""

from __future__ import annotations

from collections.abc import Callable
from functools import wraps
from typing import Any, TypeAlias

import torch

LossFunction: TypeAlias = Callable[..., torch.Tensor]
"""A function from the outputs and the targets of a micro-batch to a scalar."""


def with_own_storage(loss_fn: LossFunction) -> LossFunction:
    """Return a function that computes the same loss, copied if its storage has more bytes than the loss."""

    @wraps(loss_fn)
    def compute(*args: Any, **kwargs: Any) -> torch.Tensor:
        loss = loss_fn(*args, **kwargs)
        # A pipeline keeps each loss to the end of a step. That of `mse_loss` would keep a storage of the
        # outputs' size as long.
        return loss.clone() if loss.untyped_storage().nbytes() > loss.nbytes else loss

    return compute
