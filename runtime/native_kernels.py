"""Keep ATen calls whole while a step is traced.

For some ops PyTorch registers a Python decomposition that replaces the C++ kernel under tracing alone: an
``upsample_bilinear2d`` becomes forty index calls, slower, with other rounding, and keeping several times the
memory. Eager mode runs the kernel, so the step that is planned has to as well. A ``dropout`` becomes the fused one,
which on a CPU eager mode does not run, and which scales by another last bit at some rates (0.15 for one). A recurrent
layer becomes a loop over its steps.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from functools import cache
from typing import Any

import torch
from torch._C import DispatchKey
from torch._ops import OpOverload
from torch.utils._python_dispatch import _disable_current_modes

PREFIXES = ("upsample_", "_upsample_", "hardshrink", "softshrink", "lstm", "gru", "rnn_tanh", "rnn_relu")
KEYS = (DispatchKey.Autograd, DispatchKey.CompositeImplicitAutograd)


def _training_rnn_layer(*args: Any, **kwargs: Any) -> Any:
    """The kernel leaves its backward what that reads only where gradients are enabled, whatever its ``train`` says."""
    with torch.enable_grad():
        return torch.ops.aten.mkldnn_rnn_layer.default(*args, **kwargs)


_AS_IN_EAGER: dict[Any, Callable[..., Any]] = {torch.ops.aten.mkldnn_rnn_layer.default: _training_rnn_layer}


def kernel_of(target: Callable[..., Any]) -> Callable[..., Any]:
    """What runs a call outside of autograd with the results that eager mode gets within it."""
    kernel: Callable[..., Any] = getattr(target, "_op", target)  # an OpOverload's own call only passes on
    return _AS_IN_EAGER.get(target, kernel)


def _overloads() -> Iterator[OpOverload]:
    for name in dir(torch.ops.aten):
        if name.startswith(PREFIXES):
            packet = getattr(torch.ops.aten, name)
            yield from (getattr(packet, overload) for overload in packet.overloads())


@cache
def _fused_scales_alike(rate: float, dtype: torch.dtype) -> bool:
    """Whether the fused dropout, which scales by a number, gives the bits of a product with scaled noise."""
    if rate == 1:
        return False  # the fused one draws all the same
    with _disable_current_modes():
        noise = torch.ones((), dtype=dtype).div_(1 - rate).double()
        return bool(noise == torch.tensor(1 / (1 - rate), dtype=torch.promote_types(dtype, torch.float32)))


def _dropout_of(fused: Callable[..., Any]) -> Callable[..., Any]:
    """A kernel for dropout: ``fused``, or where its bits are others what eager mode does on a CPU."""

    def dropout(x: torch.Tensor, rate: float, train: bool | None) -> Any:
        if not train or x.device.type != "cpu" or _fused_scales_alike(rate, x.dtype):
            return fused(x, rate, train)
        return x * (torch.empty_like(x).bernoulli_(1 - rate).div_(1 - rate) if rate < 1 else x.new_zeros(()))

    return dropout


@contextmanager
def native_kernels() -> Iterator[None]:
    """Within it, tracing sees these ops as eager mode runs them."""
    dropout = torch.ops.aten.dropout.default
    before = [(op, key, op.py_kernels[key]) for op in _overloads() for key in KEYS if key in op.py_kernels]
    fused = [(dropout, key, dropout.py_kernels[key]) for key in KEYS if key in dropout.py_kernels]
    for op, key, _ in before:
        del op.py_kernels[key]
    for op, key, kernel in fused:
        op.py_kernels[key] = _dropout_of(kernel)
    _forget_dispatch(before + fused)
    try:
        yield
    finally:
        for op, key, kernel in before + fused:
            op.py_kernels[key] = kernel
        _forget_dispatch(before + fused)


def _forget_dispatch(kernels: Iterable[tuple[OpOverload, DispatchKey, Any]]) -> None:
    for op, _, _ in kernels:
        op._dispatch_cache.clear()
