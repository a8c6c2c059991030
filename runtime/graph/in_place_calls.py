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


def as_run(call: Call) -> Call:
    """Return a call with the op that runs: the one that writes in place if the call does."""
    return replace(call, target=IN_PLACE[call.target]) if call.in_place else call
