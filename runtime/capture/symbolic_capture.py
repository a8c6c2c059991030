"""Capture a module with symbolic sizes of its batch, so that one capture serves all shapes that its guard accepts."""

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
    """Trace as `capture.capture` does, with open sizes of the batch. Return the step as it was read, from which
    `OpenStep.of` makes an open step.

    ``symbols``: new symbols for the batch's sizes.

    Raises:
        NotSymbolic: some size must be fixed.
        ModelError: as `capture`.
    """
    decisions.now = symbols.now
    return trace_joint_graph(TraceRequest(module, batch, name, root, decisions, symbols))
