"""The functions of the table of split rules for losses."""

from __future__ import annotations

import math
from dataclasses import replace

from rematplan.runtime.graph.captured_step import Ref
from rematplan.runtime.split.rule_functions import (
    HALF,
    LOSS,
    SUM,
    DimensionRule,
    Labels,
    Mean,
    Rule,
    Shaped,
    aligned,
    pointwise,
)

MEAN, TOTAL = 1, 2
"""What a loss is of those of its elements: one of the reductions that are arguments."""


def class_loss(one: Shaped) -> DimensionRule:
    """Return the rule of the mean or sum over rows of negative logarithms of probabilities. Both results are computed
    from those of all rows."""
    scores, targets = one.operand(0), one.operand(1)
    rows = _rows(one, targets)
    labels: dict[str, Labels] = {targets: rows, scores: _with_classes(rows)}
    if isinstance(one.call.args[2], Ref):
        labels[one.operand(2)] = ("class",)
    labels |= dict.fromkeys(one.results, ())
    return DimensionRule(labels, frozenset({"class"}), LOSS)


def class_loss_backward(one: Shaped) -> DimensionRule:
    """Return the rule of the backward of `class_loss`: each row's gradient depends on that row, and on the mean's
    divisor."""
    targets = one.operand(2)
    rows = _rows(one, targets)
    labels: dict[str, Labels] = {one.operand(0): rows if one.shape(one.operand(0)) else (), targets: rows}
    for value in (*one.operands, *one.results):
        if value not in labels:
            labels[value] = _with_classes(rows) if len(one.shape(value)) == len(rows) + 1 else ()
    if isinstance(one.call.args[3], Ref):
        labels[one.operand(3)] = ("class",)
    return DimensionRule(labels, frozenset({"class"}))


def _rows(one: Shaped, targets: str) -> Labels:
    return tuple(range(len(one.shape(targets))))


def _with_classes(rows: Labels) -> Labels:
    return (*rows[:1], "class", *rows[1:])


def element_loss(at: int, scores: int = 0, scales: bool = False) -> Rule:
    """Return the rule of a loss of elements, or of its backward; for a reduction in 16 bits that rule returns None.
    ``at``: the argument with the reduction. ``scores``: the argument with the scores, above 0 for a backward.
    ``scales``: whether the backward of a mean is that of a sum of 1 / n times the gradient, bit by bit if that is 1."""

    def rule(one: Shaped) -> DimensionRule | None:
        """Return the pointwise rule without a reduction; else the rule of a sum, or of a mean as a divided sum; None in
        16 bits."""
        how, x = one.argument(at, MEAN), one.operand(scores)
        shape, dtype = one.shape(x), one.step.values[x].fake.dtype
        if how not in (MEAN, TOTAL):
            return pointwise(one)
        if dtype in HALF:
            return None  # the sum of a part would be rounded, and may be too large
        labels = {v: aligned(one.shape(v), shape) for v in (*one.operands, *one.results)}
        before = (*one.call.args, *([None] * at))[:at]
        summed = replace(one.call, args=(*before, TOTAL, *one.call.args[at + 1 :]))
        mean = Mean(summed, math.prod(shape), scales) if how == MEAN else None
        return DimensionRule(labels, without="" if scores else SUM, mean=mean)

    return rule
