"""Buffers that a forward changes, such as running statistics, are updated once per training step although ops may
run again.

The captured step returns new content, which the caller copies into the buffer after the forward
(`autograd_function`, `fx_graphs`). A backward half that reads it gets a copy of the old.
"""

from __future__ import annotations

from rematplan.runtime.graph.captured_step import CapturedStep


def renewed_buffers(step: CapturedStep) -> set[str]:
    """Return the names of the storages of those buffers for which a step computes new content."""
    renewed = {o.target for o in step.outputs if o.kind == "buffer"}
    kinds = ("buffer", "parameter")  # a forward may also change a frozen parameter
    return {step.values[i.value].storage for i in step.inputs if i.kind in kinds and i.target in renewed}
