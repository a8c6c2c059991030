"""The functions to call for ops outside autograd so that results have the same bits as in eager mode."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

ATEN = torch.ops.aten


def _training_rnn_layer(*args: Any, **kwargs: Any) -> Any:
    """Run oneDNN's RNN kernel with gradients enabled. Otherwise it does not save what its backward reads, even if its
    argument ``train`` is true."""
    with torch.enable_grad():
        return ATEN.mkldnn_rnn_layer.default(*args, **kwargs)


def _batch_norm_backward(*args: Any) -> Any:
    """Run the backward of batch norm on a copy of cuDNN's reserve tensor, the last argument, which cuDNN may overwrite.
    Autograd's formula copies it, too, if the graph is retained."""
    return ATEN.batch_norm_backward.default(*args[:-1], args[-1].clone())


_AS_IN_EAGER: dict[Any, Callable[..., Any]] = {
    ATEN.mkldnn_rnn_layer.default: _training_rnn_layer,
    ATEN.batch_norm_backward.default: _batch_norm_backward,
}


def kernel_of(target: Callable[..., Any]) -> Callable[..., Any]:
    """Return the function that computes outside autograd the bits that the op ``target`` has in eager mode under
    autograd; usually the op itself."""
    kernel: Callable[..., Any] = getattr(target, "_op", target)  # OpOverload.__call__ only forwards to _op
    return _AS_IN_EAGER.get(target, kernel)
