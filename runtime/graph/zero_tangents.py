"""The values of the backward half that are zero when some tangents (gradients of outputs) are missing."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

import torch

from rematplan.runtime.graph.captured_step import Call, CapturedStep, Ref, refs


@dataclass(frozen=True, slots=True)
class Zeros:
    """The effect of missing tangents (gradients of outputs that the loss does not use) on a step.

    ``values``: names of the values that are zero, the missing tangents included. ``sums``: the additions of a zero to
    another value, as a dict from the name of the addition's call to the name of the other value, which equals the sum.
    """

    values: frozenset[str]
    sums: dict[str, str]


def zeros_without(step: CapturedStep, missing: Iterable[str]) -> Zeros:
    """Return which values of a step are zero, and which sums equal one of their summands, if some tangents (gradients
    of outputs) are missing.

    The backward half is linear in the tangents. So a call returns zero if all arguments that are computed from tangents
    are zero.
    """
    late = {i.value for i in step.inputs if i.kind == "tangent"}
    zero = set(missing)
    sums: dict[str, str] = {}
    for call in step.calls:
        of_tangents = [r.value for r in refs((call.args, call.kwargs)) if r.value in late]
        if not of_tangents:
            continue
        results = [r for r in call.results if r]
        late.update(results)
        left = [v for v in of_tangents if v not in zero]
        if not left:
            zero.update(results)
        elif len(left) < len(of_tangents) and _is_plain_sum(call):
            sums[call.name] = left[0]
    return Zeros(frozenset(zero), sums)


def changes_strides(step: CapturedStep, missing: Iterable[str]) -> bool:
    """Return whether the absence of some tangents (gradients of outputs) changes the strides of a sum. A sum of a zero
    and another value is replaced by the other value, whose strides may differ from those of the sum.
    """
    strides = {name: value.fake.stride() for name, value in step.values.items()}
    sums = zeros_without(step, missing).sums
    return any(strides[str(step.call[name].results[0])] != strides[value] for name, value in sums.items())


def _is_plain_sum(call: Call) -> bool:
    summands = [a for a in call.args if isinstance(a, Ref)]
    return call.target is torch.ops.aten.add.Tensor and len(summands) == 2 and not call.kwargs
