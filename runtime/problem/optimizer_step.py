"""Add the optimizer's step to a planning problem, as its last op."""

from __future__ import annotations

from dataclasses import replace

from rematplan.ir import Op, Tensor, TrainingGraph
from rematplan.runtime.graph.captured_step import CapturedStep
from rematplan.runtime.problem.loss_boundary import OPTIMIZER


def with_optimizer_step(step: CapturedStep, graph: TrainingGraph, transient: int) -> TrainingGraph:
    """Return a planning problem with one more op at its end, the optimizer's step, which the caller runs when all
    outputs exist.

    The workspace of that op is ``transient`` minus the bytes of the outputs' gradients. The problem counts these
    gradients as inputs, but they are freed before the optimizer runs.
    """
    if not transient:
        return graph
    tangents = {step.values[i.value].storage for i in step.inputs if i.kind == "tangent"}
    gone = sum(graph.size[t] for t in tangents - set(graph.outputs))
    stepped = Op(OPTIMIZER, graph.outputs, (OPTIMIZER,), 0.0, max(0, transient - gone), "backward")
    return replace(
        graph,
        tensors=(*graph.tensors, Tensor(OPTIMIZER, 0)),
        outputs=(*graph.outputs, OPTIMIZER),
        ops=(*graph.ops, stepped),
        never_rerun=(*graph.never_rerun, OPTIMIZER),
    )
