"""The losses among a model's outputs, and the outputs from which they are computed."""

from __future__ import annotations

import torch

from rematplan.runtime.graph.captured_step import CapturedStep, refs

CLONE = torch.ops.aten.clone.default


def in_own_losses(step: CapturedStep) -> frozenset[str]:
    """Return the outputs of a step that are losses, and the outputs from which such a loss is computed, as a set of
    positions (decimal text).

    Only outputs with a tangent (their gradient, an input of the backward half) count. An output of at most one element
    is assumed to be a loss: a training loop calls backward on it, and not on the outputs from which it is computed.
    """
    tangents = {i.target for i in step.inputs if i.kind == "tangent"}
    outputs = {o.target: o.value for o in step.outputs if o.kind == "output" and o.target in tangents}
    scalars = {target for target, value in outputs.items() if step.values[value].fake.numel() <= 1}
    within = {step.values[outputs[target]].storage for target in scalars}
    for call in reversed(step.calls):
        if not within.isdisjoint(step.writes(call)):
            within.update(step.reads(call))
    return frozenset(t for t, value in outputs.items() if step.values[_copied(step, value)].storage in within)


def _copied(step: CapturedStep, value: str) -> str:
    """Return the name of the value that the output ``value`` is a clone of; ``value`` itself if it is no clone.
    (Capture clones outputs that are views.)"""
    call = step.call.get(step.values[value].call or "")
    return next(refs(call.args)).value if call and call.target is CLONE else value
