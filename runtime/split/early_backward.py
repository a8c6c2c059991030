"""Which regions with a loss can compute the loss's gradient in the forward half, part by part.

A backward is linear in the gradient of the loss, so it may run with 1 in its place and be scaled later. Each part's
scores are then computed once, as in fused kernels (Liger Kernel, Hsu et al. 2024).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch

from rematplan.runtime.capture.loss_in_place import CrossEntropyBackward
from rematplan.runtime.graph.captured_step import Call, refs
from rematplan.runtime.split.axis_spans import AxisSpan
from rematplan.runtime.split.regions import SplitRegion, StepUse
from rematplan.runtime.split.rule_functions import LOSS
from rematplan.runtime.split.split_table import rule_of

ATEN = torch.ops.aten
FIRST, FIRST_IF_ZERO, ANY_ONE, ALL = "first", "first, if the last argument is 0", "any one", "all"
"""In which operands a call is linear: in the first; in each of two, if the other is constant; in all together."""
LINEAR: Mapping[Any, str] = {
    ATEN.nll_loss_backward: FIRST,
    ATEN.nll_loss2d_backward: FIRST,
    ATEN._log_softmax_backward_data: FIRST,
    ATEN._softmax_backward_data: FIRST,
    ATEN.tanh_backward: FIRST,
    ATEN.sigmoid_backward: FIRST,
    ATEN.gelu_backward: FIRST,
    ATEN.silu_backward: FIRST,
    ATEN.threshold_backward: FIRST,
    ATEN.native_layer_norm_backward: FIRST,
    ATEN.convolution_backward: FIRST,
    ATEN.embedding_dense_backward: FIRST,
    ATEN.slice_backward: FIRST,
    ATEN.mse_loss_backward: FIRST,
    ATEN.smooth_l1_loss_backward: FIRST,
    ATEN.huber_loss_backward: FIRST,
    ATEN.binary_cross_entropy_backward: FIRST,
    ATEN.leaky_relu_backward: FIRST,
    ATEN.upsample_bilinear2d_backward: FIRST,
    ATEN._to_copy: FIRST,
    ATEN.clone: FIRST,
    ATEN.neg: FIRST,
    ATEN.masked_fill.Scalar: FIRST_IF_ZERO,
    ATEN.sum: FIRST,
    ATEN.div.Tensor: FIRST,
    ATEN.div.Scalar: FIRST,
    ATEN.mul: ANY_ONE,
    ATEN.mm: ANY_ONE,
    ATEN.bmm: ANY_ONE,
    ATEN.add: ALL,
    ATEN.sub: ALL,
}
"""By op, in which operands it is linear. Views are linear, too."""


@dataclass(frozen=True)
class EarlyBackward:
    """The backward of a region that can run in the forward half."""

    tangent: str
    """The value with the gradient of the loss, a single number."""
    before: Mapping[str, Call]
    """By result, the calls between it and the region, such as products with the weights of two terms of the loss."""
    scaled: frozenset[str]
    """The values of the region's backward, and of the calls before it, that depend on ``tangent``."""


def early_backward(use: StepUse, region: SplitRegion) -> EarlyBackward | None:
    """Return the backward of a region with a loss that can run in the forward half, or None if it cannot. It must be
    linear in the loss's gradient, read nothing else that is computed after the loss, and not be in float16."""
    step, inside = use.step, set(region.calls)
    late = [c for c in step.calls if c.name in inside and c.backward]
    early = [c for c in step.calls if c.name in inside and not c.backward]
    if not late or LOSS not in region.modules or any(c.late for c in late):
        return None
    divisors = {c.results[1] for c in early if region.states.get(c.results[0] or "") == LOSS}
    waits = _following(use, {i.value for i in step.inputs if i.kind == "tangent"}, inside)
    after = _following(use, {r for c in early for r in c.made} - divisors, inside)
    read = {v for c in late for v in c.operands if not _is_part(use, region, v)}
    tangent, before = _source(use, read & waits, waits)
    if tangent is None or not read.isdisjoint(after):
        return None
    scaled = {tangent}
    for call in step.calls:
        mine = call.name in inside and call.backward
        if scaled.isdisjoint(call.operands) or not (mine or call.is_view or call in before):
            continue
        if (mine or call in before) and not _is_linear(call, scaled):
            return None
        if call in before and not after.isdisjoint(call.operands):
            return None
        scaled.update(call.made)
    # Gradients that no factor has scaled may be too small for the type.
    if any(step.values[v].fake.dtype == torch.float16 for v in scaled):
        return None
    made = {r: c for c in before for r in c.made}
    return EarlyBackward(tangent, made, frozenset(scaled - {tangent}))


def scales_gradients(use: StepUse, region: SplitRegion) -> bool:
    """Return whether the gradient of a region's loss is multiplied in another order than unsplit."""
    rules = (rule_of(use.step, use.step.call[name]) for name in region.calls)
    means = (rule.mean for rule in rules if rule is not None)
    return early_backward(use, region) is not None or any(mean.scales for mean in means if mean)


def _source(use: StepUse, read: set[str], waits: set[str]) -> tuple[str | None, list[Call]]:
    """Return the tensor of one number from which the values ``read`` are computed, and the calls that do so; None if
    there is no single one. ``waits``: all values that are computed from tangents."""
    one = next(iter(read), "")
    if len(read) == 1 and use.step.values[one].fake.numel() == 1:
        return one, []
    needed, before = set(read), []
    for call in reversed(use.step.calls):
        if not needed.isdisjoint(call.made):
            before.append(call)
            needed |= waits.intersection(call.operands)
    sources = needed & {i.value for i in use.step.inputs}
    if len(sources) != 1 or use.step.values[one := sources.pop()].fake.numel() != 1:
        return None, []
    return one, before


def _following(use: StepUse, values: set[str], inside: set[str]) -> set[str]:
    """Return values and all that depends on them through calls that are not ``inside``."""
    found = set(values)
    for call in use.step.calls:
        if call.name not in inside and not found.isdisjoint(call.operands):
            found.update(call.made)
    return found


def _is_part(use: StepUse, region: SplitRegion, value: str) -> bool:
    """Return whether calls of the region read a value in parts: it has the axis, and the region makes it or what it is
    a view of."""
    while (call := use.maker.get(value)) is not None and isinstance(region.states.get(value), AxisSpan):
        if not call.is_view:
            return call.name in region.calls
        value = next(refs(call.args)).value
    return False


def _is_linear(call: Call, changing: set[str]) -> bool:
    """Return whether a call is linear in the operands among ``changing``."""
    fused = isinstance(call.target, CrossEntropyBackward)
    how = LINEAR.get(call.target, LINEAR.get(getattr(call.target, "overloadpacket", None)))
    how = FIRST if call.is_view or fused else how
    operands = [r in changing for r in call.operands]
    if how == FIRST_IF_ZERO:
        how = FIRST if call.args[-1] == 0 else None
    if how == ALL:
        return all(operands) and len(operands) == 2
    if how == ANY_ONE:
        return sum(operands) == 1
    return how == FIRST and operands[0] and not any(operands[1:])
