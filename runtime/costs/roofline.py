"""Roofline costs: the time of an op is the larger of its arithmetic time and its memory traffic time
(Williams et al. 2009)."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from typing import Any, TypeAlias

import torch

from rematplan.runtime.costs.device_models import DeviceModel
from rematplan.runtime.graph.call_cost import CallCost
from rematplan.runtime.graph.captured_step import Call, CapturedStep, substitute

aten = torch.ops.aten

FlopRow: TypeAlias = Callable[[tuple[Any, ...], list[torch.Tensor | None]], float]
"""A function of a call's arguments (fakes in place of tensors) and results that returns the number of
arithmetic operations."""


def roofline_costs(step: CapturedStep, device: DeviceModel) -> dict[str, CallCost]:
    """Return, by name, the modelled costs of a step's calls and inverses, without views. The time, in microseconds, is
    the launch time plus the larger of arithmetic and memory time. The workspace is 0, except for fused kernels."""
    costs: dict[str, CallCost] = {}
    for call in step.priced_calls:
        results = [step.values[r].fake if r else None for r in call.results]
        dtype = next((r.dtype for r in results if r is not None), torch.float32)
        time = device.time(flops(step, call), moved_bytes(step, call), dtype)
        costs[call.name] = CallCost(time, getattr(call.target, "workspace", 0))
    return costs


def moved_bytes(step: CapturedStep, call: Call) -> int:
    """Return the `distinct_bytes` of all tensors that a call reads and writes."""
    read = dict.fromkeys(call.operands)
    tensors = [step.values[v].fake for v in (*read, *call.made)]
    return sum(map(distinct_bytes, tensors))


def flops(step: CapturedStep, call: Call) -> float:
    """Return a call's arithmetic operations: its op's ``flops``, or by `FLOPS`, else one per result element."""
    own = getattr(call.target, "flops", None)
    if isinstance(own, float):
        return own
    results = [step.values[r].fake if r else None for r in call.results]
    row = FLOPS.get(getattr(call.target, "overloadpacket", None))
    if row is None:
        return float(sum(r.numel() for r in results if r is not None))
    return row(substitute(call.args, lambda name: step.values[name].fake), results)


def distinct_bytes(t: torch.Tensor) -> int:
    """Return the bytes of a tensor's elements, of those that a stride of 0 repeats only once."""
    sizes = (n for n, stride in zip(t.shape, t.stride(), strict=True) if stride or not n)
    return t.element_size() * math.prod(sizes)


def _matmul(a: torch.Tensor, b: torch.Tensor) -> float:
    return 2.0 * a.numel() * b.shape[-1]


def _convolution(args: tuple[Any, ...], results: list[torch.Tensor | None]) -> float:
    out, (x, weight), transposed = results[0], args[:2], args[6]
    assert out is not None
    # A weight is (out, in / groups, ...) or, transposed, (in, out / groups, ...). In both cases each element of
    # the output (transposed: of the input) takes part in weight.numel() / weight.shape[0] products.
    slid = x if transposed else out
    return float(2.0 * slid.numel() * weight.numel() / weight.shape[0])


def _convolution_backward(args: tuple[Any, ...], _results: list[torch.Tensor | None]) -> float:
    grad, x, weight, transposed, mask = args[0], args[1], args[2], args[7], args[10]
    slid = x if transposed else grad
    one = 2.0 * slid.numel() * weight.numel() / weight.shape[0]
    return float(one * (bool(mask[0]) + bool(mask[1])) + (grad.numel() if mask[2] else 0))


def _attention(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> float:
    # Two matrix products for each query and head: with the keys, and with the values.
    return 2.0 * math.prod(q.shape[:-1]) * k.shape[-2] * (q.shape[-1] + v.shape[-1])


def _attention_forward(args: tuple[Any, ...], _results: list[torch.Tensor | None]) -> float:
    return _attention(args[0], args[1], args[2])


def _attention_backward(args: tuple[Any, ...], _results: list[torch.Tensor | None]) -> float:
    # Five matrix products instead of two: the attention weights are computed again.
    return 2.5 * _attention(args[1], args[2], args[3])


FLOPS: Mapping[Any, FlopRow] = {
    aten.mm: lambda a, r: _matmul(a[0], a[1]),
    aten.bmm: lambda a, r: _matmul(a[0], a[1]),
    aten.addmm: lambda a, r: _matmul(a[1], a[2]),
    aten.baddbmm: lambda a, r: _matmul(a[1], a[2]),
    aten.mv: lambda a, r: 2.0 * a[0].numel(),
    aten.dot: lambda a, r: 2.0 * a[0].numel(),
    aten.convolution: _convolution,
    aten.convolution_backward: _convolution_backward,
    aten._scaled_dot_product_flash_attention: _attention_forward,
    aten._scaled_dot_product_efficient_attention: _attention_forward,
    aten._scaled_dot_product_cudnn_attention: _attention_forward,
    aten._scaled_dot_product_flash_attention_for_cpu: _attention_forward,
    aten._scaled_dot_product_flash_attention_backward: _attention_backward,
    aten._scaled_dot_product_efficient_attention_backward: _attention_backward,
    aten._scaled_dot_product_cudnn_attention_backward: _attention_backward,
    aten._scaled_dot_product_flash_attention_for_cpu_backward: _attention_backward,
}
