"""The values of the backward half that are zero when some tangents (gradients of outputs) are missing."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

import torch

from rematplan.runtime.graph.captured_step import Call, CapturedStep, Ref


@dataclass(frozen=True, slots=True)
class Zeros:
    """The effect on a step of missing tangents: gradients of outputs that the loss does not use."""

    values: frozenset[str]
    """The names of values that are zero, the missing tangents included."""
    sums: dict[str, str]
    """By the name of a call that adds a zero to another value, the name of that value, which equals the sum."""


def zeros_without(step: CapturedStep, missing: Iterable[str]) -> Zeros:
    """Return which values of the backward half are zero, and which sums without ``alpha`` equal one summand, if the
    tangents ``missing``, by value name, are zero."""
    late = {i.value for i in step.inputs if i.kind == "tangent"}
    zero = set(missing)
    sums: dict[str, str] = {}
    for call in step.calls:
        of_tangents = [r for r in call.operands if r in late]
        if not of_tangents:
            continue
        results = list(call.made)
        late.update(results)
        # The backward half is linear in the tangents: a call whose arguments from tangents are all zero
        # returns zero.
        left = [v for v in of_tangents if v not in zero]
        if not left:
            zero.update(results)
        elif len(left) < len(of_tangents) and _is_plain_sum(call):
            sums[call.name] = left[0]
    return Zeros(frozenset(zero), sums)


def changes_strides(step: CapturedStep, missing: Iterable[str]) -> bool:
    """Return whether missing tangents replace a sum with a zero by a summand of other strides."""
    strides = {name: value.fake.stride() for name, value in step.values.items()}
    sums = zeros_without(step, missing).sums
    return any(strides[str(step.call[name].results[0])] != strides[value] for name, value in sums.items())


def _is_plain_sum(call: Call) -> bool:
    summands = [a for a in call.args if isinstance(a, Ref)]
    return call.target is torch.ops.aten.add.Tensor and len(summands) == 2 and not call.kwargs
