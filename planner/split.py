"""What a schedule holds at its peak, by kind."""

from __future__ import annotations

from rematplan.ir import TrainingGraph
from rematplan.planner.schedule import Run, Schedule
from rematplan.planner.simulator import simulate

ACTIVATIONS, GRADIENTS, WORKSPACE, INPUTS = "activations", "gradients", "workspace", "inputs"


def peak_split(graph: TrainingGraph, schedule: Schedule) -> dict[str, int]:
    """Bytes at the peak by kind; they sum to the peak.

    The problem's own split of its inputs (parameters, buffers, batch, ...), or one entry for all of them;
    activations (what forward ops wrote), gradients (what backward ops wrote), and the workspace of the op
    that runs there.
    """
    at = simulate(graph, schedule).peak_at
    held = {INPUTS: graph.input_bytes - sum(graph.fixed_split.values())} | dict(graph.fixed_split)
    held |= {ACTIVATIONS: 0, GRADIENTS: 0, WORKSPACE: 0}
    resident: set[str] = set()
    for step in schedule[: at + 1]:
        if isinstance(step, Run):
            resident.update(graph.op[step.op].writes)
        else:
            resident.discard(step.tensor)
    for tensor in resident:
        backward = graph.ops[graph.producer[tensor]].phase == "backward"
        held[GRADIENTS if backward else ACTIVATIONS] += graph.size[tensor]
    if at >= 0 and isinstance(last := schedule[at], Run):
        held[WORKSPACE] = graph.op[last.op].workspace
    return {kind: n for kind, n in held.items() if n or kind != INPUTS}
