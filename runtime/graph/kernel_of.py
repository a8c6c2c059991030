"""The function to call for an op so that its result has the same bits as in eager mode."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

ATEN = torch.ops.aten


def _training_rnn_layer(*args: Any, **kwargs: Any) -> Any:
    """Run the RNN kernel with gradients enabled. Only then does it save what its backward reads, whatever its
    ``train`` argument says."""
    with torch.enable_grad():
        return ATEN.mkldnn_rnn_layer.default(*args, **kwargs)


def _batch_norm_backward(*args: Any) -> Any:
    """Pass a copy of the tensor that the forward reserved for cuDNN. cuDNN's kernel may overwrite it, and a
    plan may run the call twice. Autograd's own formula makes the same copy when it keeps the graph."""
    return ATEN.batch_norm_backward.default(*args[:-1], args[-1].clone())


_AS_IN_EAGER: dict[Any, Callable[..., Any]] = {
    ATEN.mkldnn_rnn_layer.default: _training_rnn_layer,
    ATEN.batch_norm_backward.default: _batch_norm_backward,
}


def kernel_of(target: Callable[..., Any]) -> Callable[..., Any]:
    """Return the function to call for an op outside autograd, so that its result has the same bits as in eager mode
    under autograd. For most ops that is the op itself."""
    kernel: Callable[..., Any] = getattr(target, "_op", target)  # OpOverload.__call__ only forwards to _op
    return _AS_IN_EAGER.get(target, kernel)
