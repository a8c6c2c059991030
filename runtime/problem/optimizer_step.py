"""Add the optimizer's step to a planning problem, as its last op."""

from __future__ import annotations

from dataclasses import replace

from rematplan.ir import Op, Tensor, TrainingGraph
from rematplan.runtime.graph.captured_step import CapturedStep
from rematplan.runtime.problem.loss_boundary import OPTIMIZER


def with_optimizer_step(step: CapturedStep, graph: TrainingGraph, transient: int) -> TrainingGraph:
    """Return a problem with the optimizer's step as last op; the same problem if ``transient``, that step's temporary
    bytes, is 0. Its workspace is less by the outputs' gradients, which are counted as inputs but freed before."""
    if not transient:
        return graph
    tangents = step.given("tangent")
    # The problem counts the outputs' gradients as inputs, but they are freed before the optimizer runs.
    gone = sum(graph.size[t] for t in tangents - set(graph.outputs))
    stepped = Op(OPTIMIZER, graph.outputs, (OPTIMIZER,), 0.0, max(0, transient - gone), "backward")
    return replace(
        graph,
        tensors=(*graph.tensors, Tensor(OPTIMIZER, 0)),
        outputs=(*graph.outputs, OPTIMIZER),
        ops=(*graph.ops, stepped),
        never_rerun=(*graph.never_rerun, OPTIMIZER),
    )
