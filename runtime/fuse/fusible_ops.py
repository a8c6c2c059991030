"""Which ops a fused kernel can compute. All other ops, such as matrix products, convolutions, attention and random ops,
stay calls of a library."""

from __future__ import annotations

from typing import Any

import torch

from rematplan.runtime.graph.captured_step import Call, CapturedStep
from rematplan.runtime.graph.compat import OpOverload
from rematplan.runtime.graph.pointwise_ops import is_pointwise

ATEN = torch.ops.aten
DEVICES = frozenset({"cpu", "cuda"})

FUSIBLE = frozenset(
    {
        ATEN._to_copy,
        ATEN.clone,
        ATEN.cat,
        ATEN.constant_pad_nd,
        ATEN.embedding,
        ATEN.slice_backward,
        ATEN.select_backward,
        ATEN.slice_scatter,
        ATEN.select_scatter,
        ATEN.full_like,
        ATEN.zeros_like,
        ATEN.ones_like,
        ATEN.new_zeros,
        ATEN.new_ones,
        ATEN.new_full,
        ATEN.sum,
        ATEN.mean,
        ATEN.amax,
        ATEN.amin,
        ATEN.any,
        ATEN.all,
        ATEN.var,
        ATEN.var_mean,
        ATEN.logsumexp,
        ATEN._softmax,
        ATEN._softmax_backward_data,
        ATEN._log_softmax,
        ATEN._log_softmax_backward_data,
        ATEN.native_layer_norm,
        ATEN.native_layer_norm_backward,
        ATEN.native_group_norm,
        ATEN.native_group_norm_backward,
        ATEN._native_batch_norm_legit_functional,
        ATEN.native_batch_norm_backward,
    }
)
"""Ops that a fused kernel can compute, in addition to the pointwise ones."""

FACTORIES = frozenset({ATEN.full, ATEN.zeros, ATEN.ones, ATEN.scalar_tensor, ATEN.arange})
"""Ops without tensors among their arguments. A kernel computes their numbers where it needs them."""

VIEWS = frozenset(
    {
        ATEN.view,
        ATEN._unsafe_view,
        ATEN.reshape,
        ATEN.t,
        ATEN.transpose,
        ATEN.permute,
        ATEN.expand,
        ATEN.squeeze,
        ATEN.unsqueeze,
        ATEN.slice,
        ATEN.select,
        ATEN.split,
        ATEN.split_with_sizes,
        ATEN.unbind,
        ATEN.alias,
        ATEN.detach,
    }
)
"""Views that a kernel takes of its operands itself."""


def is_fusible(step: CapturedStep, call: Call) -> bool:
    """Return whether a fused kernel can compute a call."""
    kind = packet(call) in FUSIBLE or is_pointwise(call.target)
    if not kind or call.is_view or call.ordered or call.late or call.in_place:
        return False
    results = list(call.made)
    storages = [step.values[r].storage for r in results]
    read = list(call.operands)
    tensors = [step.values[v].fake for v in (*read, *results)]
    return bool(read) and len(set(storages)) == len(storages) and _plain(tensors)


def is_factory(step: CapturedStep, call: Call) -> bool:
    """Return whether a kernel can compute the result of a call that reads no tensor."""
    results = [step.values[r].fake for r in call.made]
    return packet(call) in FACTORIES and not call.operands and _plain(results)


def is_inner_view(call: Call) -> bool:
    """Return whether a call is a view that a fused kernel can compute from the tensor viewed."""
    return call.is_view and packet(call) in VIEWS


def packet(call: Call) -> Any:
    """Return the op of a call, whatever its overload; None if the call is none of PyTorch's registered ops."""
    return call.target.overloadpacket if isinstance(call.target, OpOverload) else None


def _plain(tensors: list[torch.Tensor]) -> bool:
    """Return whether all tensors are on one device and have elements that kernels compute with."""
    devices = {t.device for t in tensors}
    return (
        len(devices) == 1
        and all(d.type in DEVICES for d in devices)
        and not any(t.is_complex() or t.is_quantized or not t.numel() for t in tensors)
    )
