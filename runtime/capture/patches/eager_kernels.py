"""Make a trace record the ops that eager mode runs, where PyTorch replaces a kernel only under tracing.

Its decompositions, such as forty index calls for ``upsample_bilinear2d``, may be slower, keep more memory, and round
differently.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import cache
from itertools import groupby
from threading import get_ident
from typing import Any
from unittest.mock import patch

import torch
from torch import nn

from rematplan.runtime.capture.patches.eager_formulas import BY_VALUES, COMPOSITE, MEAN, NONE
from rematplan.runtime.graph.compat import (
    DispatchKey,
    OpOverload,
    disable_current_modes,
    get_cudnn_enabled,
    set_cudnn_enabled,
)
from rematplan.runtime.symbols.expressions import NotSymbolic

ATEN = torch.ops.aten
RECURRENT = ("lstm", "gru", "rnn_tanh", "rnn_relu")
PREFIXES = (
    "upsample_",
    "_upsample_",
    "hardshrink",
    "softshrink",
    "multi_margin_loss",
    "multilabel_margin_loss",
    *RECURRENT,
)
KEYS = (DispatchKey.Autograd, DispatchKey.CompositeImplicitAutograd)

_Kernels = dict[tuple[OpOverload, DispatchKey], Callable[..., Any] | None]


def _overloads() -> Iterator[OpOverload]:
    for name in dir(ATEN):
        if name.startswith(PREFIXES):
            packet = getattr(ATEN, name)
            yield from (getattr(packet, overload) for overload in packet.overloads())


@cache
def _fused_scales_alike(rate: float, dtype: torch.dtype) -> bool:
    """Return whether PyTorch's fused dropout has the bits of eager mode on a CPU at this rate and type."""
    if rate == 1:
        return False  # the fused kernel draws, eager mode does not
    with disable_current_modes():
        # Eager mode multiplies by noise, 0 or 1 / (1 − rate) in the input's type.
        noise = torch.ones((), dtype=dtype).div_(1 - rate).double()
        return bool(noise == torch.tensor(1 / (1 - rate), dtype=torch.promote_types(dtype, torch.float32)))


def _dropout_of(fused: Callable[..., Any]) -> Callable[..., Any]:
    """Return a function for dropout with the bits of eager mode: ``fused``, or a product with noise where that
    differs on a CPU."""

    def dropout(x: torch.Tensor, rate: float, train: bool | None) -> Any:
        if not train or x.device.type != "cpu" or _fused_scales_alike(rate, x.dtype):
            return fused(x, rate, train)
        return x * (torch.empty_like(x).bernoulli_(1 - rate).div_(1 - rate) if rate < 1 else x.new_zeros(()))

    return dropout


def _batch_norm(
    x: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None,
    mean: torch.Tensor | None,
    variance: torch.Tensor | None,
    training: bool,
    momentum: float,
    eps: float,
) -> Any:
    """Run cuDNN's batch norm under tracing, with the bits of eager mode."""
    if training and mean is not None:
        # ``cudnn_batch_norm`` changes the running statistics, but its schema does not say so. This runs the
        # same kernel.
        return ATEN._batch_norm_with_update.default(x, weight, bias, mean, variance, momentum, eps)
    cudnn = ATEN.cudnn_batch_norm.default
    with with_kernels({(cudnn, key): None for key in KEYS}):
        return cudnn(x, weight, bias, mean, variance, training, momentum, eps)


def _recurrent_of(op: OpOverload) -> Callable[..., Any]:
    """Return what runs a recurrent layer as eager mode does, but with PyTorch's cells, not cuDNN's kernel."""
    packed = op._overloadname == "data"

    def recurrent(*args: Any, **kwargs: Any) -> Any:
        """Run the layer by PyTorch's cells. cuDNN is disabled meanwhile, for the whole process."""
        if packed:
            # The op reads the values of the batch sizes.
            args = (args[0], _real(args[1]), *args[2:])
        # cuDNN's kernel reads the addresses of the weights, which a trace has not.
        before = get_cudnn_enabled()
        set_cudnn_enabled(False)
        try:
            with with_kernels({(op, key): None for key in KEYS}):
                return op(*args, **kwargs)
        finally:
            set_cudnn_enabled(before)

    return recurrent


def _real(batch_sizes: torch.Tensor) -> torch.Tensor:
    sizes = batch_sizes.tolist()
    with disable_current_modes():
        return torch.tensor(sizes)


def _pad_packed_sequence(
    packed: torch.Tensor, batch_sizes: torch.Tensor, batch_first: bool, padding: float, total_length: int
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the padded sequences and their lengths, as the op's kernel does, which cannot be traced: it writes lengths
    to a tensor's address."""
    sizes = batch_sizes.tolist()
    longest = total_length if total_length > 0 else len(sizes)
    padded = packed.new_full((longest, sizes[0], *packed.shape[1:]), padding)
    rows, begin = 0, 0
    for size, alike in groupby(sizes):
        end = begin + len(list(alike))
        part = packed[rows : rows + size * (end - begin)]
        padded[begin:end, :size].copy_(part.view(end - begin, size, *packed.shape[1:]))
        rows, begin = rows + size * (end - begin), end
    lengths = torch.tensor([sum(size > at for size in sizes) for at in range(sizes[0])])
    return padded.transpose(0, 1) if batch_first else padded, lengths


def _ctc_loss(
    log_probs: torch.Tensor,
    targets: torch.Tensor,
    input_lengths: Sequence[int],
    target_lengths: Sequence[int],
    blank: int = 0,
    reduction: int = MEAN,
    zero_infinity: bool = False,
) -> torch.Tensor:
    """Compute the CTC loss with its kernel's bits. A mean is computed here, because the kernel would divide by a tensor
    that a tracer does not see."""
    arguments = log_probs, targets, input_lengths, target_lengths, blank
    wanted = NONE if reduction == MEAN else reduction
    losses: torch.Tensor = ATEN.ctc_loss.IntList._op_dk(COMPOSITE, *arguments, wanted, zero_infinity)
    if reduction != MEAN:
        return losses
    lengths = torch.tensor(target_lengths, dtype=losses.dtype, device=losses.device)
    return (losses / lengths.clamp_min(1)).mean()


def _product_of(traced: Callable[..., Any]) -> Callable[..., Any]:
    """Return a function that multiplies matrices as eager mode does: by ``traced``, the traced decomposition, except
    where only eager mode folds a batch of one."""

    def product(a: torch.Tensor, b: torch.Tensor) -> Any:
        large, small = (a, b) if a.dim() >= b.dim() else (b, a)
        # Eager mode folds (batch, n, k) to (batch · n, k) also for a batch of one that is transposed, if the matrix
        # needs no gradient. The traced decomposition does not.
        same = small.dim() > 2 or small.requires_grad or large.is_contiguous()
        return traced(a, b) if same else ATEN.matmul.default._op_dk(COMPOSITE, a, b)

    return product


def _resizing_of(op: OpOverload) -> Callable[..., Any]:
    """Return a function for an interpolation op with symbolic sizes, which calls the op's kernel. The function raises
    `NotSymbolic` for a factor that is not whole."""
    kernel = getattr(ATEN, op._opname).default

    def resizing(
        x: torch.Tensor, output_size: Sequence[int] | None, *options: Any, **named: Any
    ) -> torch.Tensor:
        """Run the kernel with ``output_size``, by default computed from the factors; `NotSymbolic` if one is not
        whole."""
        *flags, factors = *options, *named.values()
        if output_size is None:
            if any(factor != int(factor) for factor in factors):
                raise NotSymbolic("it interpolates by a factor that is no whole number")
            output_size = [size * int(factor) for size, factor in zip(x.shape[2:], factors, strict=True)]
        scales = factors if factors is not None else [None] * len(output_size)
        resized: torch.Tensor = kernel(x, output_size, *flags, *scales)
        return resized

    return resizing


@contextmanager
def native_kernels(open_sizes: bool = False) -> Iterator[None]:
    """Make a trace inside the block record the ops that eager mode runs. ``open_sizes``: whether sizes are symbols,
    which interpolations in C++ refuse, so that Python code runs them."""
    dropout, cudnn = ATEN.dropout.default, ATEN.cudnn_batch_norm.default
    pad, matmul = ATEN._pad_packed_sequence.default, ATEN.matmul.default
    kernels: _Kernels = {
        (op, key): _recurrent_of(op) if op._opname.startswith(RECURRENT) else None
        for op in _overloads()
        for key in KEYS
        if key in op.py_kernels
    }
    kernels |= {
        (dropout, key): _dropout_of(kernel) for key, kernel in dropout.py_kernels.items() if key in KEYS
    }
    kernels |= {(cudnn, key): _batch_norm for key in cudnn.py_kernels if key in KEYS}
    kernels |= {(pad, key): _pad_packed_sequence for key in KEYS}
    if not open_sizes and COMPOSITE in matmul.py_kernels:
        kernels[matmul, COMPOSITE] = _product_of(matmul.py_kernels[COMPOSITE])
    kernels |= BY_VALUES
    kernels[ATEN.ctc_loss.IntList, COMPOSITE] = _ctc_loss
    if open_sizes:
        kernels |= {(op, COMPOSITE): _resizing_of(op) for op in _overloads() if op._overloadname == "vec"}
    flatten = nn.RNNBase.flatten_parameters
    thread = get_ident()  # all threads see the replaced method

    def flatten_for_cudnn(layer: nn.RNNBase) -> None:
        if get_ident() != thread:
            flatten(layer)

    with patch.object(nn.RNNBase, "flatten_parameters", flatten_for_cudnn), with_kernels(kernels):
        yield


@contextmanager
def with_kernels(kernels: _Kernels) -> Iterator[None]:
    """Replace Python kernels of ops, by op and dispatch key, inside the block; None removes one. Previous ones are
    restored."""
    before: _Kernels = {(op, key): op.py_kernels.get(key) for op, key in kernels}
    _put(kernels)
    try:
        yield
    finally:
        _put(before)


def _put(kernels: _Kernels) -> None:
    for (op, key), kernel in kernels.items():
        if kernel is None:
            op.py_kernels.pop(key, None)
        else:
            op.py_kernels[key] = kernel
        op._dispatch_cache.clear()
