"""Which dimensions of an op's operands and results belong together: the table `RULES`, one row an op.

An op can be split along an axis if each part of its results depends on that part of its operands only. A result
without the axis is the sum of the parts' results.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from rematplan.runtime.capture.loss_in_place import CrossEntropyBackward
from rematplan.runtime.graph.captured_step import Call, CapturedStep
from rematplan.runtime.graph.pointwise_ops import is_pointwise
from rematplan.runtime.split.axis_spans import AxisSpan, through_view, trimmed
from rematplan.runtime.split.rule_functions import (
    ATEN,
    SUM,
    DimensionRule,
    Rule,
    Shaped,
    State,
    along,
    attention,
    embedding,
    embedding_backward,
    filled,
    gathered,
    indexed,
    joined,
    last,
    normalised,
    permuted,
    pointwise,
    product,
    reduction,
    repeated,
    selected,
    squeezed,
    swapped,
)
from rematplan.runtime.split.rule_functions_of_images import convolution, convolution_backward, group_norm
from rematplan.runtime.split.rule_functions_of_losses import class_loss, class_loss_backward, element_loss

RULES: Mapping[Any, Rule] = {
    ATEN._to_copy: pointwise,
    ATEN.clone: pointwise,
    ATEN.alias: pointwise,
    ATEN.detach: pointwise,
    ATEN.where: pointwise,
    ATEN.zeros_like: pointwise,
    ATEN.ones_like: pointwise,
    ATEN.full_like: pointwise,
    ATEN.log_sigmoid_forward: pointwise,
    ATEN.log_sigmoid_backward: pointwise,
    ATEN.expand: filled,
    ATEN.new_zeros: filled,
    ATEN.new_ones: filled,
    ATEN.new_full: filled,
    ATEN.t: permuted(lambda one, rank: range(rank)[::-1]),
    ATEN.transpose: permuted(swapped),
    ATEN.permute: permuted(lambda one, rank: [d % rank for d in one.call.args[1]]),
    ATEN.select: selected,
    ATEN.unbind: selected,
    ATEN.unsqueeze: joined(1),
    ATEN.stack: joined(1),
    ATEN.select_backward: joined(2, 1),
    ATEN.squeeze: squeezed,
    ATEN.slice: along(1),
    ATEN.split: along(2),
    ATEN.split_with_sizes: along(2),
    ATEN.cat: along(1),
    ATEN.slice_backward: along(2, 1),
    ATEN.glu: along(1, default=-1),
    ATEN.glu_backward: along(2),
    ATEN.cumsum: along(1),
    ATEN.cumprod: along(1),
    ATEN.flip: along(1),
    ATEN.roll: along(2),
    ATEN.repeat: repeated,
    ATEN.topk: along(2, default=-1),
    ATEN._softmax: along(1),
    ATEN._safe_softmax: along(1),
    ATEN._log_softmax: along(1),
    ATEN._softmax_backward_data: along(2),
    ATEN._log_softmax_backward_data: along(2),
    ATEN.sum: reduction(SUM),
    ATEN.mean: reduction(SUM),
    ATEN.amax: reduction(""),
    ATEN.amin: reduction(""),
    ATEN.max.dim: reduction(""),
    ATEN.min.dim: reduction(""),
    ATEN.argmax: reduction(""),
    ATEN.logsumexp: reduction(""),
    ATEN.var.correction: reduction(""),
    ATEN.std.correction: reduction(""),
    ATEN.var_mean.correction: reduction(""),
    ATEN.linalg_vector_norm: reduction("", 2),
    ATEN.gather: gathered,
    ATEN.scatter: gathered,
    ATEN.scatter_add: gathered,
    ATEN.index: indexed,
    ATEN.mm: product("ik,kj->ij"),
    ATEN.bmm: product("bik,bkj->bij"),
    ATEN.addmm: product("ij,ik,kj->ij"),
    ATEN.baddbmm: product("bij,bik,bkj->bij"),
    ATEN.embedding: embedding,
    ATEN.embedding_dense_backward: embedding_backward,
    ATEN.native_layer_norm: normalised(1, (0,), ""),
    ATEN.native_layer_norm_backward: normalised(2, (0, 1), SUM),
    ATEN._scaled_dot_product_flash_attention_for_cpu: attention(0),
    ATEN._scaled_dot_product_flash_attention_for_cpu_backward: attention(1),
    ATEN.nll_loss_forward: class_loss,
    ATEN.nll_loss2d_forward: class_loss,
    ATEN.nll_loss_backward: class_loss_backward,
    ATEN.nll_loss2d_backward: class_loss_backward,
    ATEN.mse_loss: element_loss(2),
    ATEN.mse_loss_backward: element_loss(3, 1, scales=True),
    ATEN.smooth_l1_loss: element_loss(2),
    ATEN.smooth_l1_loss_backward: element_loss(3, 1, scales=True),
    ATEN.huber_loss: element_loss(2),
    ATEN.huber_loss_backward: element_loss(3, 1, scales=True),
    ATEN.binary_cross_entropy: element_loss(3),
    ATEN.binary_cross_entropy_backward: element_loss(4, 1),
    ATEN.binary_cross_entropy_with_logits: element_loss(4),
    ATEN.convolution: convolution,
    ATEN.convolution_backward: convolution_backward,
    ATEN.native_group_norm: group_norm(3, ""),
    ATEN.native_group_norm_backward: group_norm(5, SUM),
    ATEN.tril: last(2),
    ATEN.triu: last(2),
    ATEN.avg_pool2d: last(2),
    ATEN.avg_pool2d_backward: last(2),
    ATEN._adaptive_avg_pool2d: last(2),
    ATEN._adaptive_avg_pool2d_backward: last(2),
    ATEN.max_pool2d_with_indices: last(2),
    ATEN.max_pool2d_with_indices_backward: last(2),
    ATEN.upsample_nearest2d: last(2),
    ATEN.upsample_nearest2d_backward: last(2, 2),
    ATEN.upsample_bilinear2d: last(2),
    ATEN.upsample_bilinear2d_backward: last(2, 2),
    ATEN.upsample_bicubic2d: last(2),
    ATEN.upsample_bicubic2d_backward: last(2, 2),
    ATEN.reflection_pad2d: last(2),
    ATEN.reflection_pad2d_backward: last(2),
    ATEN.pixel_shuffle: last(3),
    ATEN.pixel_unshuffle: last(3),
}
"""By op, how its dimensions belong together. Pointwise ops have no row: `pointwise` is that of all. Views that merge
or divide dimensions have none either (`through_view`)."""

RESHAPES = frozenset({ATEN.view, ATEN._unsafe_view, ATEN.reshape})
"""Ops that keep the order of all numbers, and change the shape."""


def rule_of(step: CapturedStep, call: Call) -> DimensionRule | None:
    """Return how the dimensions of a call's tensors belong together; None if the call cannot be split."""
    one = Shaped(call, step)
    packet = getattr(call.target, "overloadpacket", None)
    if call.ordered or call.waits or not one.results or not one.operands:
        return None
    if isinstance(call.target, CrossEntropyBackward):
        return class_loss_backward(one)
    if (rule := RULES.get(call.target) or RULES.get(packet)) is not None:
        return rule(one)
    return pointwise(one) if is_pointwise(call.target) else None


def states_of(
    step: CapturedStep, call: Call, known: Mapping[str, State], indices: int
) -> dict[str, State] | None:
    """Return the states of a call's operands and results if it is split along an axis. None if it cannot be split, or
    if none of them is known to have the axis. An operand without a state is read whole. ``known``: states of values.
    ``indices``: the length of the axis."""
    one = Shaped(call, step)
    have = {v: s for v in (*one.operands, *one.results) if isinstance(s := known.get(v), AxisSpan)}
    if not have:
        return None
    if hasattr(call.target, "of_rows"):
        x = one.call.args[-1].value
        sums = have.keys() == {x} and call.target.of_rows(one.shape(x), have[x], indices, indices)
        return {x: have[x], one.results[0]: SUM} if sums else None
    reshapes = getattr(call.target, "overloadpacket", None) in RESHAPES
    found = _reshaped(one, have, indices) if reshapes else _labelled(one, have)
    if found is None or any(found.get(v) != s for v, s in have.items()):
        return None
    return found


def _labelled(one: Shaped, have: Mapping[str, AxisSpan]) -> dict[str, State] | None:
    """Return the states of a call's values by the labels of its dimensions; None if the call cannot be split along this
    axis. ``have``: where the call's values have the axis, as far as known."""
    rule = rule_of(one.step, one.call)
    value, span = next(iter(have.items()))
    if rule is None or value not in rule.labels:
        return None
    axis = rule.labels[value][span.first : span.last + 1]
    if None in axis or not rule.whole.isdisjoint(axis) or (rule.single and len(axis) > 1):
        return None
    found: dict[str, State] = {}
    for other in (*one.operands, *one.results):
        at = [d for d, label in enumerate(rule.labels[other]) if label in axis]
        if at:
            if tuple(rule.labels[other][at[0] : at[-1] + 1]) != axis:
                return None
            found[other] = trimmed(one.shape(other), AxisSpan(at[0], at[-1], span.inner))
        elif other in one.results:
            if not rule.without:
                return None
            found[other] = rule.without
    return found


def _reshaped(one: Shaped, have: Mapping[str, AxisSpan], indices: int) -> dict[str, State] | None:
    x, y = one.operand(0), one.results[0]
    a = have.get(x) or through_view(one.shape(y), one.shape(x), have[y], indices)
    b = a and through_view(one.shape(x), one.shape(y), a, indices)
    return {x: a, y: b} if a and b else None
