"""The training step of a stage in a dataflow pipeline, in which inverses recompute the stage's inputs from its
outputs in the backward.

As in Gomez et al., «The reversible residual network», NeurIPS 2017, but across processes. Calls take the batch and
gradients from messages, and free them after the last read.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace

import torch

from rematplan.ir import Op, Tensor, TrainingGraph
from rematplan.runtime.capture.output_storages import is_whole
from rematplan.runtime.graph.captured_step import (
    CapturedStep,
    Ref,
    StepInput,
    StepOutput,
    Value,
    free_name,
    single_call,
)
from rematplan.runtime.inversion.find_inverses import with_inverses
from rematplan.runtime.problem.loss_boundary import LATE, LOSS
from rematplan.runtime.problem.random_states import without_random_states

SEND, RETURN = "(send)", "(return)"
"""The op that represents sending the outputs to the next stage, and the op that represents returning the
inputs with their gradients to the previous one; also the names of their zero-byte tensors."""
KEPT_BACK = (*LATE, "recovered input")
"""The kinds of a step's outputs that its backward half computes."""


@dataclass(frozen=True)
class Handed:
    """An op that takes a tensor from a message. Its result is a view of the received tensor, at no cost."""

    size: tuple[int, ...]
    stride: tuple[int, ...]
    """With ``size``: the shape and strides of the result."""
    flops = 0.0
    source_name = "handed_over"

    @classmethod
    def like(cls, fake: torch.Tensor) -> Handed:
        """Return the op whose result has the shape and strides of ``fake``."""
        return cls(tuple(fake.shape), tuple(fake.stride()))

    def __call__(self, tensor: torch.Tensor) -> torch.Tensor:
        """Return a view of the received tensor with ``size`` and ``stride``."""
        return tensor.as_strided(self.size, self.stride)

    def __str__(self) -> str:
        return f"{self.source_name} {self.size} {self.stride}"


def dataflow_step(
    step: CapturedStep, named: Mapping[str, torch.Tensor], *, first: bool, last: bool
) -> CapturedStep:
    """Return the captured step of a pipeline stage with calls that take inputs and gradients from messages, and with
    inverses. Stages except the ``last`` also take their outputs from the next one's message; stages except the
    ``first`` return their inputs. ``named``: parameters and buffers, by name."""
    values = dict(step.values)
    moved = {i.value: i for i in step.inputs if i.kind == "tangent" or (i.kind == "batch" and not first)}

    def source(name: str, like: torch.Tensor) -> str:
        own = free_name(f"{name}_handed", values)
        values[own] = Value(own, own, None, like)
        return own

    inputs, calls = [], []
    for i in step.inputs:
        if i.value not in moved:
            inputs.append(i)
            continue
        own = source(i.value, values[i.value].fake)
        name = f"take_{i.value}"
        target = Handed.like(values[i.value].fake)
        calls.append(single_call(name, target, (Ref(own),), result=i.value, backward=i.kind == "tangent"))
        values[i.value] = replace(values[i.value], call=name)
        inputs.append(replace(i, value=own))
    early = [call for call in calls if not call.backward]
    late = [call for call in calls if call.backward]
    boundary = next((at for at, c in enumerate(step.calls) if c.name in step.after_loss), len(step.calls))
    returned = tuple(
        StepOutput("recovered input", i.target, v) for v, i in moved.items() if i.kind == "batch"
    )
    opened = replace(
        step,
        inputs=tuple(inputs),
        outputs=(*step.outputs, *returned),
        calls=(*early, *step.calls[:boundary], *late, *step.calls[boundary:]),
        values=values,
    )
    opened = with_inverses(opened, named, renormalise=True, own_seeds=True).step
    return opened if last else _answered(opened)


def _answered(step: CapturedStep) -> CapturedStep:
    """Return the step with an inverse for each output that is contiguous and fills its storage. The inverse takes that
    output from the next stage's message."""
    values, inputs, inverses = dict(step.values), [], []
    for o in step.outputs:
        value = step.values[o.value]
        base = step.values.get(value.storage, value)
        if o.kind != "output" or not value.fake.is_contiguous() or not (is_whole(value) and is_whole(base)):
            continue
        own = free_name(f"{o.value}_answer", values)
        values[own] = Value(own, own, None, value.fake)
        inputs.append(StepInput("answer", o.target, own))
        target = Handed.like(base.fake)
        inverses.append(single_call(f"answer_{o.value}", target, (Ref(own),), result=base.name, noise=0.0))
    return replace(step, inputs=(*step.inputs, *inputs), values=values, inverses=(*step.inverses, *inverses))


def with_dataflow_boundary(
    step: CapturedStep, graph: TrainingGraph, *, last: bool, loss_bytes: int
) -> TrainingGraph:
    """Return the planning problem of a stage in a dataflow pipeline, with ops for its messages. `SEND` sends outputs
    and writes buffers, `LOSS` separates the halves, `RETURN` sends recomputed inputs and their gradients, if there are
    any. ``loss_bytes``: the workspace of `LOSS` on the last stage."""
    graph = without_random_states(graph)  # each random call has a seed of its own
    early = dict.fromkeys(step.values[o.value].storage for o in step.outputs if o.kind not in KEPT_BACK)
    outputs = step.returned("output")
    late, marked = step.after_loss, {c.name for c in step.calls if c.late}
    back = step.given("tangent", "answer")
    # On the last stage, `LOSS` reads the outputs instead.
    sent = tuple(t for t in early if not (last and t in outputs))
    send = Op(SEND, sent, (SEND,), 0.0, 0, "forward")
    returned = tuple(step.returned("recovered input", "input gradient"))
    end = (Op(RETURN, (*returned, LOSS), (RETURN,), 0.0, 0, "backward"),) if returned else ()
    boundary = Op(
        LOSS, (SEND, *(outputs if last else ())), (LOSS,), 0.0, loss_bytes if last else 0, "backward"
    )

    def after(op: Op) -> Op:
        waits = not back.isdisjoint(op.reads) or op.name in marked
        return replace(op, reads=tuple(dict.fromkeys((*op.reads, LOSS)))) if waits else op

    renewed = step.renewed
    # New content overwrites a buffer at `SEND`, so its readers run once, as calls that take a message do.
    once = [op.name for op in graph.ops if not renewed.isdisjoint(op.reads)]
    once += [call.name for call in step.calls if isinstance(call.target, Handed)]
    # Each random call has a separate seed, so it may run again.
    drawing = {call.name for call in step.calls if call.seeded}
    once += [name for name in graph.never_rerun if name not in drawing]
    leaving = {*(t for t in early if t in graph.producer), *returned}
    return replace(
        graph,
        tensors=(*graph.tensors, *(Tensor(op.name, 0) for op in (send, boundary, *end))),
        outputs=(*(t for t in graph.outputs if t not in leaving), *(op.name for op in end)),
        ops=(
            *(op for op in graph.ops if op.name not in late),
            send,
            boundary,
            *(after(op) for op in graph.ops if op.name in late),
            *end,
        ),
        inverses=tuple(after(i) for i in graph.inverses if not (last and not outputs.isdisjoint(i.writes))),
        ordered=tuple(graph.ordered),
        never_rerun=tuple(dict.fromkeys((*once, SEND, LOSS, *(op.name for op in end)))),
    )
