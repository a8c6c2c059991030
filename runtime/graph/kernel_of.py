"""The kernel that gives a call the bits that eager mode gets."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

ATEN = torch.ops.aten


def _training_rnn_layer(*args: Any, **kwargs: Any) -> Any:
    """The kernel leaves its backward what that reads only where gradients are enabled, whatever its ``train`` says."""
    with torch.enable_grad():
        return ATEN.mkldnn_rnn_layer.default(*args, **kwargs)


def _batch_norm_backward(*args: Any) -> Any:
    """cuDNN's kernel may write over what its forward left for it (autograd's own formula copies that where it is needed
    again), and a plan may run it twice."""
    return ATEN.batch_norm_backward.default(*args[:-1], args[-1].clone())


_AS_IN_EAGER: dict[Any, Callable[..., Any]] = {
    ATEN.mkldnn_rnn_layer.default: _training_rnn_layer,
    ATEN.batch_norm_backward.default: _batch_norm_backward,
}


def kernel_of(target: Callable[..., Any]) -> Callable[..., Any]:
    """What runs a call outside of autograd with the results that eager mode gets within it."""
    kernel: Callable[..., Any] = getattr(target, "_op", target)  # an OpOverload's own call only passes on
    return _AS_IN_EAGER.get(target, kernel)
