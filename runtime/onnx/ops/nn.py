"""ONNX ops for layers (convolution, normalisation, dropout) as functions on torch tensors."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from rematplan.ir.onnx.graph import Node
from rematplan.runtime.onnx.ops.rows import integer, intended, ints, number, op, refuse, text

CONV: dict[int, Callable[..., Tensor]] = {1: F.conv1d, 2: F.conv2d, 3: F.conv3d}
CONV_TRANSPOSE: dict[int, Callable[..., Tensor]] = {
    1: F.conv_transpose1d,
    2: F.conv_transpose2d,
    3: F.conv_transpose3d,
}


# ------------------------------------------------------------------ windows


def spread(node: Node, name: str, rank: int) -> tuple[int, ...]:
    """Return an attribute with one number per spatial axis, such as ``strides``; ones if it is absent, `ModelError` if
    it has another number of them."""
    values = ints(node, name) or (1,) * rank
    if len(values) != rank:
        raise refuse(node, f"{name} has {len(values)} numbers for {rank} spatial axes")
    return values


def window_pads(
    node: Node, sizes: Sequence[int], kernel: Sequence[int], strides: Sequence[int], dilations: Sequence[int]
) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """Return the padding before and after each spatial axis, from ``pads`` or ``auto_pad``; `ModelError` for an unknown
    mode or another number of pads."""
    rank, mode = len(sizes), text(node, "auto_pad", "NOTSET")
    if mode == "VALID":
        return (0,) * rank, (0,) * rank
    if mode == "NOTSET":
        pads = ints(node, "pads") or (0,) * (2 * rank)
        if len(pads) != 2 * rank:
            raise refuse(node, f"pads has {len(pads)} numbers for {rank} spatial axes")
        return pads[:rank], pads[rank:]
    if mode not in ("SAME_UPPER", "SAME_LOWER"):
        raise refuse(node, f"auto_pad {mode!r} is not supported")
    before, after = [], []
    for size, k, s, d in zip(sizes, kernel, strides, dilations, strict=True):
        total = max((math.ceil(size / s) - 1) * s + (k - 1) * d + 1 - size, 0)
        small, large = total // 2, total - total // 2
        before.append(small if mode == "SAME_UPPER" else large)
        after.append(large if mode == "SAME_UPPER" else small)
    return tuple(before), tuple(after)


def pad_spatial(x: Tensor, before: Sequence[int], after: Sequence[int], value: float = 0.0) -> Tensor:
    """Pad the last axes of ``x`` with ``value``. ``before`` and ``after`` have a number of elements for each axis; a
    negative number crops."""
    pairs = [p for b, a in zip(reversed(before), reversed(after), strict=True) for p in (b, a)]
    return F.pad(x, pairs, value=value) if any(pairs) else x


# ------------------------------------------------------------------ convolution


@op("Conv", 1, 11, 22)
def conv(node: Node, x: Tensor, w: Tensor, b: Tensor | None = None) -> Tensor:
    """Run ONNX Conv on ``x`` (N, C, …) with 1 to 3 spatial axes, else `ModelError`. ``w``: (C', C ÷ group, …). ``b``:
    (C') or None."""
    rank = x.dim() - 2
    if rank not in CONV:
        raise refuse(node, f"{rank} spatial axes; 1, 2 and 3 are supported")
    strides, dilations = spread(node, "strides", rank), spread(node, "dilations", rank)
    before, after = window_pads(node, x.shape[2:], w.shape[2:], strides, dilations)
    if before != after:
        x, before = pad_spatial(x, before, after), (0,) * rank
    return CONV[rank](x, w, b, strides, before, dilations, integer(node, "group", 1))


@op("ConvTranspose", 1, 11, 22)
def conv_transpose(node: Node, x: Tensor, w: Tensor, b: Tensor | None = None) -> Tensor:
    """Run ONNX ConvTranspose on ``x`` (N, C, …) with 1 to 3 spatial axes, else `ModelError`. ``w``: (C, C' ÷ group, …).
    ``b``: (C') or None."""
    rank = x.dim() - 2
    if rank not in CONV_TRANSPOSE:
        raise refuse(node, f"{rank} spatial axes; 1, 2 and 3 are supported")
    strides, dilations = spread(node, "strides", rank), spread(node, "dilations", rank)
    extra = ints(node, "output_padding") or (0,) * rank
    group = integer(node, "group", 1)
    before, after = _transpose_pads(node, x.shape[2:], w.shape[2:], strides, dilations, extra)
    even = before == after and all(p >= 0 for p in before)
    # torch requires output_padding < stride or dilation; a larger one only adds padding
    if even and all(e < max(s, d) for e, s, d in zip(extra, strides, dilations, strict=True)):
        return CONV_TRANSPOSE[rank](x, w, b, strides, before, extra, group, dilations)
    # Torch supports no asymmetric or negative padding: compute without padding, then crop or extend.
    full = CONV_TRANSPOSE[rank](x, w, None, strides, 0, 0, group, dilations)
    full = pad_spatial(full, [-p for p in before], [e - p for e, p in zip(extra, after, strict=True)])
    return full if b is None else full + b.view(-1, *[1] * rank)


def _transpose_pads(
    node: Node,
    sizes: Sequence[int],
    kernel: Sequence[int],
    strides: Sequence[int],
    dilations: Sequence[int],
    extra: Sequence[int],
) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """Return how much to crop from a transposed convolution's unpadded result before and after each spatial axis, by
    ONNX's formula."""
    mode, shape = text(node, "auto_pad", "NOTSET"), ints(node, "output_shape")
    if shape is None and mode in ("NOTSET", "VALID"):
        return window_pads(node, sizes, kernel, strides, dilations)
    wanted = shape[-len(sizes) :] if shape else [n * s for n, s in zip(sizes, strides, strict=True)]
    before, after = [], []
    for n, k, s, d, e, out in zip(sizes, kernel, strides, dilations, extra, wanted, strict=True):
        total = s * (n - 1) + e + (k - 1) * d + 1 - out
        half = total // 2
        before.append(half if mode == "SAME_UPPER" else total - half)
        after.append(total - half if mode == "SAME_UPPER" else half)
    return tuple(before), tuple(after)


# ------------------------------------------------------------------ normalisation


def _batch_norm(node: Node, x: Tensor, w: Tensor, b: Tensor, mean: Tensor, var: Tensor) -> Tensor:
    eps = number(node, "epsilon", 1e-5)
    if not (mean.requires_grad or var.requires_grad):
        return torch.batch_norm(x, w, b, mean, var, False, 0.0, eps, False)
    # Statistics that the graph computes; torch's op gives them no gradient.
    shape = (-1, *(1 for _ in x.shape[2:]))
    mean, scale, b = (t.reshape(shape) for t in (mean, w * torch.rsqrt(var + eps), b))
    return (x - mean) * scale + b


def _trained_batch_norm(
    node: Node, x: Tensor, w: Tensor, b: Tensor, mean: Tensor, var: Tensor
) -> tuple[Tensor, Tensor, Tensor]:
    """Normalise ``x`` by the batch. Return the result and the new running statistics, ``old · momentum + batch · (1 −
    momentum)``."""
    keep, eps = number(node, "momentum", 0.9), number(node, "epsilon", 1e-5)
    count = x.numel() // x.shape[1] if x.dim() > 1 else x.numel()
    if count == 1:  # one value per channel is the mean, and the variance is 0
        y = torch.batch_norm(x, w, b, None, None, True, 0.0, eps, False)
        seen = x.detach().reshape(-1).to(mean.dtype)
        return y, mean * keep + seen * (1 - keep), var * keep
    new_mean, new_var = mean.detach().clone(), var.detach().clone()
    y = torch.batch_norm(x, w, b, new_mean, new_var, True, 1.0 - keep, eps, False)
    # ONNX's batch variance s has the divisor n, torch's n − 1. From torch's v' = m·v + (1−m)·s·n/(n−1),
    # ONNX's m·v + (1−m)·s is v'·(n−1)/n + m·v/n.
    return y, new_mean, new_var * ((count - 1) / count) + var.detach() * (keep / count)


@op("BatchNormalization", 14, 15)
def batch_norm(node: Node, *inputs: Tensor) -> Any:
    """Run ONNX BatchNormalization on X, scale, shift, running mean and variance. If ``training_mode`` is set, return X
    normalised by the batch with new running statistics; else X normalised by the running ones."""
    return (
        _trained_batch_norm(node, *inputs)
        if integer(node, "training_mode", 0)
        else _batch_norm(node, *inputs)
    )


@op("BatchNormalization", 7, 9)
def batch_norm_by_outputs(node: Node, *inputs: Tensor) -> Any:
    """Run ONNX BatchNormalization of opsets 7 to 13 on X, scale, shift, running mean and variance. A node with one
    output normalises by the running statistics, others by the batch, and return new and batch statistics as
    requested."""
    if len(node.outputs) == 1:
        return _batch_norm(node, *inputs)
    return _with_saved(node, *inputs)


@op("BatchNormalization", 1, 6)
def batch_norm_by_test_flag(node: Node, *inputs: Tensor) -> Any:
    """Run ONNX BatchNormalization of opsets below 7: by the running statistics if ``is_test`` is set; else by the
    batch, with new and batch statistics as requested."""
    return _batch_norm(node, *inputs) if integer(node, "is_test", 0) else _with_saved(node, *inputs)


def _with_saved(node: Node, x: Tensor, *rest: Tensor) -> tuple[Tensor, ...]:
    y, mean, var = _trained_batch_norm(node, x, *rest)
    if not any(node.outputs[3:]):
        return y, mean, var
    axes = [0, *range(2, x.dim())]
    return y, mean, var, x.detach().mean(axes), x.detach().var(axes, correction=0)


@op("InstanceNormalization", 1, 6, 22)
def instance_norm(node: Node, x: Tensor, w: Tensor, b: Tensor) -> Tensor:
    """Run ONNX InstanceNormalization: normalise each channel of ``x`` (N, C, …). ``w``, ``b``: scale, shift (C)."""
    return torch.instance_norm(x, w, b, None, None, True, 0.0, number(node, "epsilon", 1e-5), False)


@op("LayerNormalization", 17)
def layer_norm(node: Node, x: Tensor, w: Tensor, b: Tensor | None = None) -> Any:
    """Run ONNX LayerNormalization over the axes from ``axis`` on. Return the result, the mean and the inverse
    standard deviation."""
    axis = integer(node, "axis", -1) % x.dim()
    shape = list(x.shape[axis:])
    eps = number(node, "epsilon", 1e-5)
    if list(w.shape) == shape and (b is None or list(b.shape) == shape):
        y, mean, inverse = torch.native_layer_norm(x, shape, w, b, eps)
    else:  # a scale that is broadcast over the normalised axes
        y, mean, inverse = torch.native_layer_norm(x, shape, None, None, eps)
        y = y * w if b is None else y * w + b
    return y, mean, inverse


@op("GroupNormalization", 21)
def group_norm(node: Node, x: Tensor, w: Tensor, b: Tensor) -> Tensor:
    """Run ONNX GroupNormalization: normalise groups of channels of ``x`` (N, C, …). ``w``, ``b``: scale, shift (C)."""
    return torch.group_norm(x, integer(node, "num_groups", 1), w, b, number(node, "epsilon", 1e-5), False)


@op("GroupNormalization", 18)
def group_norm_by_group(node: Node, x: Tensor, w: Tensor, b: Tensor) -> Tensor:
    """Run ONNX GroupNormalization of opset 18, where scale ``w`` and shift ``b`` have one number per group."""
    each = x.shape[1] // integer(node, "num_groups", 1)
    return group_norm(node, x, w.repeat_interleave(each), b.repeat_interleave(each))


@op("RMSNormalization", 23)
def rms_norm(node: Node, x: Tensor, w: Tensor) -> Tensor:
    """Run ONNX RMSNormalization: divide by the root mean square from ``axis`` on, then multiply by ``w``."""
    axis = integer(node, "axis", -1) % x.dim()
    wide = (
        x.float() if x.dtype in (torch.float16, torch.bfloat16) and integer(node, "stash_type", 1) == 1 else x
    )
    square = wide.pow(2).mean(tuple(range(axis, x.dim())), keepdim=True)
    return (wide * torch.rsqrt(square + number(node, "epsilon", 1e-5))).to(x.dtype) * w


@op("LRN", 1, 13)
def local_response_norm(node: Node, x: Tensor) -> Tensor:
    """Run ONNX LRN: divide by (bias + alpha · mean of squares over ``size`` neighbouring channels)^beta."""
    size = integer(node, "size", 1)
    alpha, beta, bias = number(node, "alpha", 1e-4), number(node, "beta", 0.75), number(node, "bias", 1.0)
    flat = x.reshape(x.shape[0], 1, x.shape[1], -1)
    # The channel is in the middle; an even size has one more neighbour with a higher index.
    squares = F.pad(flat * flat, (0, 0, (size - 1) // 2, size // 2))
    mean = F.avg_pool2d(squares, (size, 1), stride=1).reshape(x.shape)
    return x / (mean * alpha + bias) ** beta


@op("MeanVarianceNormalization", 9, 13)
def mean_variance_norm(node: Node, x: Tensor) -> Tensor:
    """Run ONNX MeanVarianceNormalization: zero mean and unit standard deviation over ``axes``, by default (0, 2, 3)."""
    axes = ints(node, "axes") or (0, 2, 3)
    centred = x - x.mean(axes, keepdim=True)
    deviation = (x.pow(2).mean(axes, keepdim=True) - x.mean(axes, keepdim=True).pow(2)).sqrt()
    return centred / (deviation + 1e-9)


@op("LpNormalization", 1, 22)
def lp_norm(node: Node, x: Tensor) -> Tensor:
    """Run ONNX LpNormalization: divide by the L1 or L2 norm along ``axis``; zero where the norm is zero."""
    norm = torch.linalg.vector_norm(x, integer(node, "p", 2), integer(node, "axis", -1), keepdim=True)
    return torch.where(
        norm == 0, torch.zeros_like(x), x / torch.where(norm == 0, torch.ones_like(norm), norm)
    )


# ------------------------------------------------------------------ dropout


@op("Dropout", 12, 13, 22, known=(1, 2), random=True)
def dropout(node: Node, x: Tensor, ratio: Any = None, training: Any = None) -> Any:
    """Run ONNX Dropout: drop elements if ``training`` is true and ``ratio`` (None for 0.5) is not 0. A second output
    is the mask of kept elements."""
    p = 0.5 if ratio is None else intended(ratio.reshape(()).item())
    if training is None or not bool(training.reshape(())) or p == 0.0:
        return (x, torch.ones_like(x, dtype=torch.bool)) if len(node.outputs) > 1 and node.outputs[1] else x
    return torch.native_dropout(x, p, True)


@op("Dropout", 7, 10)
def dropout_at_inference(node: Node, x: Tensor) -> Any:
    """Run ONNX Dropout of opsets 7 to 11: return the input and, if the node has a second output, a mask of ones."""
    return (x, torch.ones_like(x, dtype=torch.bool)) if len(node.outputs) > 1 and node.outputs[1] else x


@op("Dropout", 1, 6, random=True)
def dropout_by_test_flag(node: Node, x: Tensor) -> Any:
    """Run ONNX Dropout of opsets below 7: if ``is_test`` is set, return the input, otherwise apply dropout and return
    the result and its mask."""
    if integer(node, "is_test", 0):
        return dropout_at_inference(node, x)
    return torch.native_dropout(x, number(node, "ratio", 0.5), True)
