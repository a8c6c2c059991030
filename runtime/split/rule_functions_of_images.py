"""The functions of the table of split rules for convolutions and norms of images."""

from __future__ import annotations

from rematplan.runtime.split.rule_functions import SUM, DimensionRule, Labels, Rule, Shaped


def _fixed_in_convolution(one: Shaped, weight: str, at: int) -> frozenset[int | str]:
    """Return the labels along which a convolution cannot be split: channels, and pixels unless it is pointwise."""
    stride, padding, dilation, transposed, output_padding = one.call.args[at : at + 5]
    kernel = one.shape(weight)[2:]
    per_pixel = (
        set(kernel) <= {1} and set(stride) <= {1} and {*padding, *output_padding} <= {0} and not transposed
    )
    pixels = () if per_pixel and set(dilation) <= {1} else range(1, len(kernel) + 1)
    return frozenset({"in", "out", *pixels})


def convolution(one: Shaped) -> DimensionRule:
    """Return the rule of a convolution: it is split along images, and along pixels if each pixel is computed alone."""
    x, weight, y = one.operand(0), one.operand(1), one.results[0]
    pixels: Labels = tuple(range(1, len(one.shape(x)) - 1))
    labels: dict[str, Labels] = {x: ("n", "in", *pixels), y: ("n", "out", *pixels)}
    labels |= {value: (None,) * len(one.shape(value)) for value in one.operands if value != x}
    return DimensionRule(labels, _fixed_in_convolution(one, weight, 3))


def convolution_backward(one: Shaped) -> DimensionRule | None:
    """Return the rule of a convolution's backward: along images, and along pixels if it is pointwise; gradients of
    weight and bias are sums. None if the output's gradient is also the input."""
    gradient, x, weight = (one.operand(at) for at in range(3))
    if gradient == x:
        return None
    pixels: Labels = tuple(range(1, len(one.shape(x)) - 1))
    labels: dict[str, Labels] = {gradient: ("n", "out", *pixels), x: ("n", "in", *pixels)}
    labels |= {value: (None,) * len(one.shape(value)) for value in one.operands if value not in labels}
    for result, kind in zip(one.call.results, (labels[x], None, None), strict=True):
        if result:
            labels[result] = kind or (None,) * len(one.shape(result))
    return DimensionRule(labels, _fixed_in_convolution(one, weight, 4), SUM)


def group_norm(sizes_at: int, without: str) -> Rule:
    """Return the rule of a norm over groups of channels, split along images. ``sizes_at``: the position of the batch's
    size among the arguments. ``without``: what parts give of a result that lacks the axis (`SUM`); empty: the op is not
    split so."""

    def rule(one: Shaped) -> DimensionRule:
        x = one.operand(0)
        rank, labels = len(one.shape(x)), dict[str, Labels]()
        for value in (*one.operands, *one.results):
            own = one.shape(value)
            labels[value] = tuple(range(len(own))) if len(own) in (2, rank) else (None,) * len(own)
        return DimensionRule(labels, frozenset(range(1, rank)), without, {sizes_at: x})

    return rule
