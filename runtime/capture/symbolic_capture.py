"""Capture a module with symbols for the sizes of its batch, so that one capture serves many shapes."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import nn

from rematplan.runtime.capture.joint_trace import Traced, TraceRequest, trace_joint_graph
from rematplan.runtime.guards.decisions_by_values import ValueGuardRecorder
from rematplan.runtime.symbols.symbolic_batch import BatchSymbols


def capture_with_open_sizes(
    module: nn.Module,
    batch: Sequence[torch.Tensor],
    name: str,
    root: nn.Module,
    decisions: ValueGuardRecorder,
    symbols: BatchSymbols,
) -> Traced:
    """Trace ``module(*batch)`` with its backward, with symbols for the batch's sizes; `OpenStep.of` completes the
    step."""
    decisions.now, decisions.counts = symbols.now, symbols.counts
    return trace_joint_graph(TraceRequest(module, batch, name, root, decisions, symbols))
