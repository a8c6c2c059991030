"""Which of PyTorch's ops compute each number of their result from the numbers at its place in the operands."""

from __future__ import annotations

from typing import Any

import torch

ATEN = torch.ops.aten
UNTAGGED = frozenset(
    {
        ATEN._prelu_kernel,
        ATEN._prelu_kernel_backward,
        ATEN.elu_backward,
        ATEN.hardshrink_backward,
        ATEN.hardsigmoid_backward,
        ATEN.hardswish,
        ATEN.hardswish_backward,
        ATEN.hardtanh_backward,
        ATEN.leaky_relu_backward,
        ATEN.masked_fill,
        ATEN.mish_backward,
        ATEN.softplus_backward,
        ATEN.softshrink_backward,
    }
)
"""Pointwise ops that PyTorch does not tag as such."""


def is_pointwise(op: Any) -> bool:
    """Return whether an op is a pointwise op of PyTorch. ``op``: what a call calls."""
    tagged = torch.Tag.pointwise in getattr(op, "tags", ()) and getattr(op, "namespace", "") == "aten"
    return tagged or getattr(op, "overloadpacket", None) in UNTAGGED
