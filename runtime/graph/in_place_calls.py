"""Calls that write into the memory of their first argument (`Call.in_place`), and the ops that do."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import torch

from rematplan.runtime.graph.captured_step import Call

ATEN = torch.ops.aten
IN_PLACE: Mapping[Any, Any] = {
    ATEN.add.Tensor: ATEN.add_.Tensor,
    ATEN.mul.Tensor: ATEN.mul_.Tensor,
    ATEN.addmm.default: ATEN.addmm_.default,
    ATEN.baddbmm.default: ATEN.baddbmm_.default,
}
"""By op, the op that computes the same bits in the memory of its first argument."""
COMMUTES = frozenset({ATEN.add.Tensor, ATEN.mul.Tensor})
"""Ops whose result may be in the memory of their second operand instead of their first."""


def as_run(call: Call) -> Call:
    """Return a call with the op that runs: the one that writes in place if the call does."""
    return replace(call, target=IN_PLACE.get(call.target, call.target)) if call.in_place else call


def layout(tensor: torch.Tensor) -> tuple[Any, ...]:
    """Return a tensor's strides and offset, which say where in its storage its elements are."""
    return tensor.stride(), tensor.storage_offset()


def fills(result: torch.Tensor, operand: torch.Tensor) -> bool:
    """Return whether a result has the type, shape and strides of an operand, and both fill their storages."""
    return (
        result.shape == operand.shape
        and result.dtype == operand.dtype
        and layout(result) == layout(operand)
        and operand.untyped_storage().nbytes() == result.untyped_storage().nbytes() == result.nbytes
    )
