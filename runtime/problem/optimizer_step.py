"""The optimizer's step as the last op of a step's problem."""

from __future__ import annotations

from dataclasses import replace

from rematplan.ir import Op, Tensor, TrainingGraph
from rematplan.runtime.graph.captured_step import CapturedStep
from rematplan.runtime.problem.loss_boundary import OPTIMIZER


def with_optimizer_step(step: CapturedStep, graph: TrainingGraph, transient: int) -> TrainingGraph:
    """The problem with one more op at its end, which others run when all outputs are there.

    Args:
        step: the captured step. Its tangents are gone by then, and are charged as inputs of the problem.
        graph: its problem, with what is planned of gradients.
        transient: bytes that the optimizer's step holds beyond parameters, gradients and state.
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
