"""How buffers that a forward changes, such as running statistics of batch norm, are updated once per training step.

An op that updates a buffer may run several times in a step, because its other results are rematerialised. So no op
changes a buffer in place: the captured step computes the buffer's new content as an output from the old content.

- The caller copies the new content into the buffer once, after the forward (`autograd_function`, `fx_graphs`).
- If the backward half runs the op again, it needs the old content. The generated source then keeps a copy of the old
  content (`codegen.Writer`).
"""

from __future__ import annotations

from rematplan.runtime.graph.captured_step import CapturedStep


def renewed_buffers(step: CapturedStep) -> set[str]:
    """Return the names of the storages of those buffers for which a step computes new content."""
    renewed = {o.target for o in step.outputs if o.kind == "buffer"}
    return {step.values[i.value].storage for i in step.inputs if i.kind == "buffer" and i.target in renewed}
