"""ONNX ops for quantisation. The scale gets a gradient from dequantisation, but none passes through integers except
in fake quantisation."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from rematplan.ir.onnx.fake_quantisation import INT32
from rematplan.ir.onnx.graph import Node
from rematplan.runtime.onnx.ops.rows import integer, ints, op, refuse
from rematplan.runtime.onnx.ops.values import ONNX_DTYPES

QUANTISED = frozenset({torch.int8, torch.uint8, torch.int16, torch.uint16})


def _along(node: Node, values: Tensor, x: Tensor, axis: int) -> Tensor:
    """Return a scale or zero point in a shape that can be broadcast to ``x``; `ModelError` for several dimensions
    without ``block_size``."""
    if values.numel() == 1:
        return values.reshape(())
    if values.dim() == 1:
        return values.reshape(-1, *[1] * (x.dim() - 1 - axis % x.dim()))
    block = integer(node, "block_size", 0)
    if block < 1:
        raise refuse(node, f"a scale of shape {tuple(values.shape)} needs a block_size")
    return values.repeat_interleave(block, axis).narrow(axis, 0, x.shape[axis])


def _wide(x: Tensor) -> Tensor:
    return x.to(torch.int32) if x.dtype in QUANTISED else x


def _quantisable(node: Node) -> None:
    stated = integer(node, "output_dtype", 0)
    if stated and ONNX_DTYPES.get(stated) not in QUANTISED:
        raise refuse(node, f"the element type {stated} is not supported")


@op("QuantizeLinear", 10, 13, 19, 21, 23, 24, 25, 28, check=_quantisable)
def quantize_linear(node: Node, x: Tensor, scale: Tensor, zero: Tensor | None = None) -> Tensor:
    """Run ONNX QuantizeLinear: ``round(x / scale) + zero``, clamped to the type of ``zero``, or of ``output_dtype``
    (default uint8). ``scale``, ``zero``: one number, one per index of ``axis``, or one per block along it."""
    whole, dtype = _rounded(node, x, scale, zero, integer(node, "output_dtype", 0))
    ends = torch.iinfo(dtype)
    return whole.clamp(ends.min, ends.max).to(dtype)


def _rounded(
    node: Node, x: Tensor, scale: Tensor, zero: Tensor | None, stated: int
) -> tuple[Tensor, torch.dtype]:
    """Return ``round(x / scale) + zero`` as int32, and the quantised type: that of ``zero``, else ONNX's number
    ``stated`` (0 for uint8). `ModelError` unless that type is in `QUANTISED`."""
    axis = integer(node, "axis", 1)
    dtype = ONNX_DTYPES.get(stated, torch.uint8) if zero is None else zero.dtype
    if dtype not in QUANTISED:
        raise refuse(node, f"quantisation to {str(dtype).removeprefix('torch.')} is not supported")
    steps = _along(node, scale, x, axis)
    if precision := ONNX_DTYPES.get(integer(node, "precision", 0)):
        x, steps = x.to(precision), steps.to(precision)
    whole = torch.round(x / steps).to(torch.int32)
    if zero is not None:
        whole = whole + _along(node, _wide(zero), x, axis)
    return whole, dtype


@op("DequantizeLinear", 10, 13, 19, 21, 23, 24, 25, 28)
def dequantize_linear(node: Node, x: Tensor, scale: Tensor, zero: Tensor | None = None) -> Tensor:
    """Run ONNX DequantizeLinear: ``(x − zero) · scale`` in the type ``output_dtype``, by default that of the scale.
    ``scale``, ``zero``: one number, one per index of ``axis``, or one per block along it. `ModelError` unless ``x`` is
    int32 or in `QUANTISED`."""
    axis = integer(node, "axis", 1)
    if x.dtype not in QUANTISED and x.dtype != torch.int32:
        raise refuse(node, f"quantisation to {str(x.dtype).removeprefix('torch.')} is not supported")
    whole = _wide(x) if zero is None else _wide(x) - _along(node, _wide(zero), x, axis)
    wide = torch.promote_types(scale.dtype, torch.float32)
    y = whole.to(wide) * _along(node, scale, x, axis).to(wide)
    return y.to(ONNX_DTYPES.get(integer(node, "output_dtype", 0), scale.dtype))


@op("FakeQuantize", 1)
def fake_quantize(node: Node, x: Tensor, scale: Tensor, zero: Tensor | None = None) -> Tensor:
    """Run QuantizeLinear and DequantizeLinear. The gradient passes unchanged where ``x`` is in the integers' range, and
    is 0 outside. The attribute ``quantised`` is the integers' type without a zero point, ``clip`` a narrower range."""
    rounded, dtype = _rounded(node, x.detach(), scale, zero, integer(node, "quantised", 0))
    ends, (low, high) = torch.iinfo(dtype), ints(node, "clip") or INT32
    whole = rounded.clamp(max(low, ends.min), min(high, ends.max))
    y: Tensor = _StraightThrough.apply(
        x, dequantize_linear(node, whole.to(dtype), scale, zero), whole == rounded
    )
    return y


class _StraightThrough(torch.autograd.Function):
    """Returns its second argument, whose gradient goes to the first where the third is true."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, y: Tensor, inside: Tensor) -> Tensor:
        ctx.dtype = x.dtype
        ctx.save_for_backward(inside)
        return y.view_as(y)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None, None]:
        (inside,) = ctx.saved_tensors
        return torch.where(inside, gradient, 0).to(ctx.dtype), None, None


@op("DynamicQuantizeLinear", 11)
def dynamic_quantize_linear(node: Node, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Run ONNX DynamicQuantizeLinear: quantise to uint8 over the range of the input, extended to include zero. Return
    the bytes, the scale and the zero point."""
    low, high = x.amin().clamp(max=0), x.amax().clamp(min=0)
    scale = (high - low) / 255
    scale = torch.where(scale == 0, torch.ones_like(scale), scale)
    zero = torch.round((-low / scale).clamp(0, 255))
    return (torch.round(x / scale) + zero).clamp(0, 255).to(torch.uint8), scale, zero.to(torch.uint8)


@op("MatMulInteger", 10)
def matmul_integer(
    node: Node, a: Tensor, b: Tensor, a_zero: Tensor | None = None, b_zero: Tensor | None = None
) -> Tensor:
    """Run ONNX MatMulInteger: (a − a_zero) (b − b_zero) as int32, with zero points for all, per row of ``a``, or per
    column of ``b``."""
    left, right = _wide(a), _wide(b)
    if a_zero is not None:
        left = left - (
            _wide(a_zero).unsqueeze(-1) if a_zero.dim() == 1 and a_zero.numel() > 1 else _wide(a_zero)
        )
    if b_zero is not None:
        right = right - _wide(b_zero)
    if left.device.type == "cpu":
        return torch.matmul(left, right)
    # Other devices do not multiply integer matrices; in double precision the product is exact.
    return torch.matmul(left.double(), right.double()).to(left.dtype)
