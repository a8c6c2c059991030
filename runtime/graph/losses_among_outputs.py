"""The losses among a model's outputs, and the outputs from which they are computed."""

from __future__ import annotations

import torch

from rematplan.runtime.graph.captured_step import CapturedStep, refs

CLONE = torch.ops.aten.clone.default


def in_own_losses(step: CapturedStep) -> frozenset[str]:
    """Return the positions, as text, of the losses and of the outputs from which a loss is computed; outputs without a
    tangent are left out. A loss is an output with a tangent and at most one element: a training loop calls backward on
    it."""
    tangents = {i.target for i in step.inputs if i.kind == "tangent"}
    outputs = {o.target: o.value for o in step.outputs if o.kind == "output" and o.target in tangents}
    scalars = {target for target, value in outputs.items() if step.values[value].fake.numel() <= 1}
    within = {step.values[outputs[target]].storage for target in scalars}
    for call in reversed(step.calls):
        if not within.isdisjoint(step.writes(call)):
            within.update(step.reads(call))
    return frozenset(t for t, value in outputs.items() if step.values[_copied(step, value)].storage in within)


def _copied(step: CapturedStep, value: str) -> str:
    """Return the value that the output ``value`` is a clone of, or ``value`` itself. Capture clones outputs that are
    views."""
    call = step.call.get(step.values[value].call or "")
    return next(refs(call.args)).value if call and call.target is CLONE else value
