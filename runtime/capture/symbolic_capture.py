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
    """Trace ``module(*batch)`` with its backward as `capture.capture` does, but with sizes of the batch that stay
    symbols. Return the step as it was read, from which `OpenStep.of` makes an open step.

    Args:
        module: the module.
        batch: the inputs.
        name: the module's name, for the step and for messages.
        root: the submodule relative to which the step names the modules of its calls.
        decisions: records the control-flow decisions that depend on values of the inputs or buffers.
        symbols: new symbols for the batch's sizes.

    Raises:
        NotSymbolic: some size must be fixed.
        ModelError: as `capture.capture`.
    """
    decisions.now = symbols.now
    return trace_joint_graph(TraceRequest(module, batch, name, root, decisions, symbols))
