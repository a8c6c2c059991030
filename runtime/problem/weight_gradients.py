"""Planning problems with a split backward: first the gradients of the inputs, later those of the weights.

In a pipeline, the second part fills idle time (Qi et al., «Zero bubble pipeline parallelism», ICLR 2024).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from types import MappingProxyType
from typing import Any

import torch

from rematplan.ir import Op, Tensor, TrainingGraph
from rematplan.runtime.graph.captured_step import Call, CapturedStep
from rematplan.runtime.problem.loss_boundary import LOSS, LOSS_VALUE, WEIGHTS


@dataclass(frozen=True)
class Masked:
    """An ATen backward op with an output mask, an argument that says which gradients it computes."""

    mask: int
    """The position of this argument."""
    input: int = 0
    """The position of the input's gradient among the op's results."""


MASKED: Mapping[Any, Masked] = MappingProxyType(
    {
        torch.ops.aten.convolution_backward.default: Masked(10),
        torch.ops.aten.native_layer_norm_backward.default: Masked(7),
        torch.ops.aten.native_group_norm_backward.default: Masked(9),
    }
)


def with_separate_weights(step: CapturedStep) -> CapturedStep:
    """Return the step in which each call in `MASKED` that computes gradients of both an input and weights is divided in
    two. The first keeps its name and computes the input's gradient, the second, ``NAME_weights``, the others."""
    calls: list[Call] = []
    made: dict[str, str] = {}
    for call in step.calls:
        parts = _split_call(call)
        calls += parts
        if len(parts) > 1:
            made.update((result, parts[1].name) for result in parts[1].made)
    values = {
        name: replace(value, call=made[name]) if name in made else value
        for name, value in step.values.items()
    }
    return replace(step, calls=tuple(calls), values=values) if made else step


def _split_call(call: Call) -> tuple[Call, ...]:
    """Return two calls that compute the gradients of input and weights separately; the call alone if it cannot be split
    or computes one kind only."""
    row = MASKED.get(call.target)
    if row is None or call.results[row.input] is None:
        return (call,)
    weights = tuple(None if k == row.input else result for k, result in enumerate(call.results))
    if not any(weights):
        return (call,)
    inputs = tuple(result if k == row.input else None for k, result in enumerate(call.results))

    def asking(name: str, results: tuple[str | None, ...]) -> Call:
        wanted = [result is not None for result in results]
        args = (*call.args[: row.mask], wanted, *call.args[row.mask + 1 :])
        return replace(call, name=name, args=args, results=results)

    return asking(call.name, inputs), asking(f"{call.name}_weights", weights)


def with_weight_boundary(step: CapturedStep, graph: TrainingGraph) -> TrainingGraph:
    """Return the problem of a split backward, from one with a loss boundary: the inputs' gradients, the op `WEIGHTS`,
    then the weights' gradients. At `WEIGHTS` the caller takes outputs, inputs' gradients and loss, which may be freed
    from then on."""
    leaving = [o.value for o in step.outputs if o.kind in ("output", "buffer", "input gradient")]
    gone = (*dict.fromkeys(step.values[v].storage for v in leaving), LOSS_VALUE)
    after = step.after_loss
    returned = step.returned("input gradient")
    # An op that reads an input's gradient belongs to the first part, even if it computes a weight's.
    reading = [op for op in graph.ops if op.name in after and not returned.isdisjoint(op.reads)]
    wanted = {*returned, *(t for op in reading for t in op.writes)}
    sooner: set[str] = set()
    for op in reversed(graph.ops):
        if op.name in after and not wanted.isdisjoint(op.writes):
            sooner.add(op.name)
            wanted.update(op.reads)
    first = [op for op in graph.ops if op.name not in after or op.name in sooner]
    later = [op for op in graph.ops if op.name in after and op.name not in sooner]
    made = {t for op in first for t in op.writes}
    boundary = Op(WEIGHTS, (*(t for t in gone if t in made), LOSS), (WEIGHTS,), 0.0, 0, "backward")
    inputs = set(graph.inputs)

    def after_weights(op: Op) -> Op:
        # `WEIGHTS` replaces the outputs and buffers that it reads only so that they exist at the loss
        # boundary.
        read = set(step.reads(step.call[op.name])) if op.name in step.call else {*op.reads}
        return replace(op, reads=(*(t for t in op.reads if t not in gone or t in read), WEIGHTS))

    ops = (*first, boundary, *map(after_weights, later))
    ordered = {*graph.ordered, *((*(op.name for op in reading), WEIGHTS) if reading else ())}
    return replace(
        graph,
        tensors=(*graph.tensors, Tensor(WEIGHTS, 0)),
        outputs=(
            *(t for t in graph.outputs if t not in gone or t in inputs),
            *(() if later else (WEIGHTS,)),  # unread, a search would leave it out
        ),
        ops=ops,
        ordered=tuple(op.name for op in ops if op.name in ordered),
        never_rerun=graph.once(*sorted(sooner), WEIGHTS),
    )
