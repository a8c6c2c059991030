"""The inverse table: for ATen calls that can be undone accurately, the rules that recompute arguments from the
result.

ReLU, max-pool, dropout, strided convolution, reductions and narrowing casts lose numbers; sigmoid and tanh lose
digits; sine and square have two arguments for a result. A product with an activation needs bounds that exclude zero.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

import torch

from rematplan.runtime.graph.captured_step import Call, Ref, Value
from rematplan.runtime.inversion.exact_rows import (
    concatenated,
    copied,
    flipped,
    padded,
    picked,
    rolled,
    scattered,
    shuffled,
    stacked,
)
from rematplan.runtime.inversion.inverse_ops import LEAST_SCALE
from rematplan.runtime.inversion.row_types import Facts, Found, Refused, Row, Undone, fits, result

aten = torch.ops.aten

STEEP = 4.0
"""The gain of an ELU's inverse: the root mean square of its slope for arguments of unit variance, with a margin."""


def undo(call: Call, facts: Facts) -> Found:
    """Yield the rules that recompute a call's arguments, and the arguments that are refused for a reason a user can
    change."""
    row = TABLE.get(getattr(call.target, "overloadpacket", None))
    if row is not None:
        yield from row(call, facts)


def _sum(sign: int) -> Row:
    """Return the row for y = self + ``sign`` · alpha · other, where other is a tensor or a number."""

    def row(call: Call, facts: Facts) -> Found:
        arguments = call.arguments()
        return _added(call, facts, arguments["self"], arguments["other"], sign, arguments.get("alpha", 1))

    return row


def _added(call: Call, facts: Facts, first: Any, second: Any, sign: int, alpha: float) -> Found:
    """Yield the rules that undo y = first ± alpha · second for either term. A ``second`` with ``alpha`` near zero, and
    a broadcast part of a storage, are refused. ``sign``: 1 or −1."""
    y = result(call, facts)
    if fits(first, y, facts):
        gain = _gain_of_term(first, facts)
        if isinstance(second, Ref):
            kernel = "subtract" if sign > 0 else "add"
            yield Undone(first.value, (y.name, second.value), kernel, (alpha,), gain)
        else:
            yield Undone(first.value, (y.name,), "shift", (-sign * alpha * second,), gain)
    if fits(second, y, facts) and isinstance(first, Ref):
        if abs(alpha) < LEAST_SCALE:
            yield Refused(second.value, f"its factor {alpha:g} is below {LEAST_SCALE:g}")
            return
        reads = (y.name, first.value) if sign > 0 else (first.value, y.name)
        gain = _gain_of_term(second, facts) * max(1.0, 1 / abs(alpha))
        yield Undone(second.value, reads, "difference", (alpha,), gain)
    for one, other in ((first, second), (second, first)):
        if _broadcast_part(one, y, facts) and isinstance(other, Ref):
            shape, whole = list(facts.value(one).fake.shape), list(y.fake.shape)
            yield Refused(one.value, f"its shape {shape} is broadcast to {whole}, which cannot be undone")


def _fused(kernel: str, *names: str) -> Row:
    """Return the row that recomputes ``self`` of y = beta · self + factor · p, or refuses a beta close to zero.
    ``names``: the arguments of which p is made."""

    def row(call: Call, facts: Facts) -> Found:
        """Yield the rule that recovers ``self`` from the result, or `Refused` if its factor ``beta`` is near zero;
        nothing if shapes or types differ."""
        arguments, y = call.arguments(), result(call, facts)
        x, beta, factor = (
            arguments["self"],
            arguments.get("beta", 1),
            arguments.get("alpha", arguments.get("value")),
        )
        if not fits(x, y, facts):
            return
        if abs(beta) < LEAST_SCALE:
            yield Refused(x.value, f"its factor {beta:g} is below {LEAST_SCALE:g}")
            return
        reads = (y.name, *(arguments[name].value for name in names))
        gain = _gain_of_term(x, facts) * max(1.0, 1 / abs(beta))
        yield Undone(x.value, reads, kernel, (factor, beta), gain)

    return row


def _between(call: Call, facts: Facts) -> Found:
    """Yield the rules for both ends of y = self + weight · (end − self) if the weight is known before the step runs. An
    end whose share comes close to zero is refused."""
    arguments, y = call.arguments(), result(call, facts)
    start, end, weight = arguments["self"], arguments["end"], arguments["weight"]
    known = (
        facts.known(weight.value) if isinstance(weight, Ref) else torch.tensor(weight, dtype=torch.float64)
    )
    if known is None or not known.numel():
        return
    reads = (weight.value,) if isinstance(weight, Ref) else ()
    constants = () if reads else (weight,)
    for x, other, share, kernel in (
        (start, end, 1 - known.double(), "lerp_start"),
        (end, start, known.double(), "lerp_end"),
    ):
        if not fits(x, y, facts):
            continue
        if not (least := float(share.abs().amin())) >= LEAST_SCALE:
            why = f"its weight comes as close to zero as {least:.3g}; the smallest that is inverted is {LEAST_SCALE:g}"
            yield Refused(x.value, why)
            continue
        gain = _gain_of_term(x, facts) * max(1.0, _mean_square(1 / share))
        scale = _mean_square(1 / share) if reads else 0.0
        yield Undone(x.value, (y.name, other.value, *reads), kernel, constants, gain, scale=scale)


def _broadcast_part(x: Any, y: Value, facts: Facts) -> bool:
    """Return whether ``x`` is part of a larger storage and is broadcast to ``y``, as the unequal halves of an odd
    number of channels are."""
    if not isinstance(x, Ref):
        return False
    value = facts.value(x)
    part = value.fake.numel() * value.fake.element_size() < value.fake.untyped_storage().nbytes()
    return part and 1 < value.fake.dim() == y.fake.dim() and value.fake.shape != y.fake.shape


def _reflected(call: Call, facts: Facts) -> Found:
    """Yield the rules that undo y = other − alpha · self, also for a tensor ``other``, if alpha is not near zero."""
    arguments, y = call.arguments(), result(call, facts)
    x, other, alpha = arguments["self"], arguments["other"], arguments["alpha"]
    if isinstance(other, Ref):
        yield from _added(call, facts, other, x, -1, alpha)
    elif fits(x, y, facts) and abs(alpha) >= LEAST_SCALE:
        yield Undone(x.value, (y.name,), "reflect", (other, alpha), max(1.0, 1 / abs(alpha)))


def _gain_of_term(x: Ref, facts: Facts) -> float:
    """Return the factor, at least 1, by which undoing a sum multiplies the relative error of its term ``x``: above 1 if
    ``x`` is a product with small numbers."""
    # The sum's error does not depend on the term's scale, so relative to a term of 0.01 · p it is 100 times as large.
    return facts.scales.get(facts.value(x).storage, 1.0)


def _product(call: Call, facts: Facts) -> Found:
    arguments, y = call.arguments(), result(call, facts)
    for x, factor in ((arguments["self"], arguments["other"]), (arguments["other"], arguments["self"])):
        if fits(x, y, facts):
            yield from _scaled(x, factor, y, "divide", facts)


def _quotient(call: Call, facts: Facts) -> Found:
    arguments, y = call.arguments(), result(call, facts)
    if arguments.get("rounding_mode") is None and fits(arguments["self"], y, facts):
        yield from _scaled(arguments["self"], arguments["other"], y, "multiply", facts)


UNWATCHED = {"divide": "quotient", "multiply": "product"}
"""By kernel that checks a scale at run time, the kernel that computes the same without a check, for a scale that
training does not change."""


def _scaled(x: Ref, factor: Any, y: Value, kernel: str, facts: Facts) -> Found:
    """Yield the rule for ``x`` from y = x · factor (``divide``) or x ÷ factor (``multiply``), or `Refused` if a known
    factor is out of bounds. Integers yield nothing, `_bounded` handles unknown factors, and ``facts.scales`` gets the
    error growth of known ones."""
    scale = (
        facts.known(factor.value) if isinstance(factor, Ref) else torch.tensor(factor, dtype=torch.float64)
    )
    if scale is None:
        yield from _bounded(x, factor, y, kernel, facts)
        return
    if not scale.is_floating_point() or not scale.numel():
        return
    sizes = scale.double().abs()
    sizes = sizes if kernel == "divide" else 1 / sizes
    least = float(sizes.amin())
    if not (least >= LEAST_SCALE and float(sizes.amax()) <= 1 / LEAST_SCALE**2):  # also true for NaN
        yield Refused(
            x.value,
            f"its scale comes as close to zero as {least:.3g}; the smallest that is inverted is {LEAST_SCALE:g}",
        )
        return
    inverse, direct = _mean_square(1 / sizes), _mean_square(sizes)
    facts.scales[y.storage] = max(1.0, inverse)
    reads = (factor.value,) if isinstance(factor, Ref) else ()
    constants = () if reads else (factor,)
    changes = bool(reads) and not facts.ranges(factor).lasting
    kernel = UNWATCHED[kernel] if reads and not changes else kernel
    watched = inverse if changes else 0.0
    yield Undone(x.value, (y.name, *reads), kernel, constants, inverse * direct, scale=watched)


def _bounded(x: Ref, factor: Ref, y: Value, kernel: str, facts: Facts) -> Found:
    """Yield the rule for ``x`` from its product with, or quotient by, an activation whose bounds exclude 0, as
    exp(tanh(s)); else nothing."""
    bounds = facts.ranges(factor)
    ends = bounds.sizes if kernel == "divide" else tuple(1 / e if e else math.inf for e in bounds.sizes[::-1])
    least, most = ends
    if not (least >= LEAST_SCALE and most <= 1 / LEAST_SCALE**2):
        return
    # The mean growth of errors, as if the activation's logarithm were uniform between its bounds.
    spread = 2 * math.log(most / least)
    inverse, direct = 1 / least, most
    if spread > 1e-6:
        inverse = math.sqrt((least**-2 - most**-2) / spread)
        direct = math.sqrt((most**2 - least**2) / spread)
    facts.scales[y.storage] = max(1.0, inverse)
    if bounds.lasting:
        kernel = UNWATCHED[kernel]
    yield Undone(x.value, (y.name, factor.value), kernel, (), inverse * direct, scale=inverse)


def _mean_square(t: torch.Tensor) -> float:
    return math.sqrt(float(t.square().mean()))


def _unary(kernel: str, exact: bool = False) -> Row:
    """Return the row for an op y = f(self) that ``kernel`` undoes from y alone."""

    def row(call: Call, facts: Facts) -> Found:
        x, y = call.arguments()["self"], result(call, facts)
        if fits(x, y, facts):
            yield Undone(x.value, (y.name,), kernel, (), exact=exact)

    return row


def _leaky_relu(call: Call, facts: Facts) -> Found:
    arguments, y = call.arguments(), result(call, facts)
    x, slope = arguments["self"], arguments["negative_slope"]
    if fits(x, y, facts):
        if slope >= LEAST_SCALE:
            yield Undone(x.value, (y.name,), "leaky_relu", (slope,))
        else:
            yield Refused(x.value, f"the slope {slope:g} of its leaky ReLU is below {LEAST_SCALE:g}")


def _elu(call: Call, facts: Facts) -> Found:
    arguments, y = call.arguments(), result(call, facts)
    constants = tuple(arguments[name] for name in ("alpha", "scale", "input_scale"))
    if fits(arguments["self"], y, facts) and min(constants) >= LEAST_SCALE:
        yield Undone(arguments["self"].value, (y.name,), "elu", constants, STEEP)


def _prelu(call: Call, facts: Facts) -> Found:
    """Yield the rule for the input of a PReLU with known slopes, or `Refused` if a slope is below `LEAST_SCALE`.
    Yield nothing if slopes are unknown, or if the input does not fit the result (see `fits`)."""
    arguments, y = call.arguments(), result(call, facts)
    x, weight = arguments["self"], arguments["weight"]
    slopes = facts.known(weight.value)
    if fits(x, y, facts) and slopes is not None:
        least = float(slopes.amin())
        if least >= LEAST_SCALE:
            steepest = _mean_square(1 / slopes)
            yield Undone(x.value, (y.name, weight.value), "prelu", (), max(1.0, steepest), scale=steepest)
        else:
            yield Refused(x.value, f"a slope of its PReLU is {least:.3g}, below {LEAST_SCALE:g}")


def _norm(kernel: str, x: str = "input") -> Row:
    """Return the row for a norm that returns its statistics, or for a frozen batch norm. It yields nothing for a weight
    that is not known before the step runs, and refuses one close to zero. ``x``: the name of the norm's input."""

    def row(call: Call, facts: Facts) -> Found:
        """Yield the rule for a norm's input, from its result, statistics and weights, or `Refused` if a weight is near
        zero. Nothing for an unknown weight or missing statistics."""
        arguments, y = call.arguments(), result(call, facts)
        if not fits(arguments[x], y, facts):
            return
        gain, affine, has = 1.0, [], []
        for name in ("weight", "bias"):
            ref = arguments.get(name)
            has.append(isinstance(ref, Ref))
            affine += [ref.value] if isinstance(ref, Ref) else []
        if has[0]:
            weight = facts.known(affine[0])
            if weight is None:
                return
            least = float(weight.abs().amin())
            if not least >= LEAST_SCALE:
                why = f"a weight of its norm is {least:.3g}; the smallest that is inverted is {LEAST_SCALE:g}"
                yield Refused(arguments[x].value, why)
                return
            gain = _mean_square(weight) * _mean_square(1 / weight)
        frozen = call.target is aten._native_batch_norm_legit_no_training.default or (
            call.target is aten.cudnn_batch_norm.default and not arguments["training"]
        )
        statistics = (
            (arguments["running_mean"].value, arguments["running_var"].value)
            if frozen
            else (call.results[1], call.results[2])
        )
        eps: tuple[float | None, ...] = (
            ((arguments.get("eps", arguments.get("epsilon")) if frozen else None),)
            if kernel == "batch_norm"
            else ()
        )
        if all(statistics):
            reads = (y.name, *(s for s in statistics if s), *affine)
            yield Undone(arguments[x].value, reads, kernel, (*has, *eps), gain, scale=gain if has[0] else 0.0)

    return row


TABLE: Mapping[Any, Row] = {
    aten.add: _sum(+1),
    aten.sub: _sum(-1),
    aten.rsub: _reflected,
    aten.lerp: _between,
    aten.addcmul: _fused("addcmul", "tensor1", "tensor2"),
    aten.addcdiv: _fused("addcdiv", "tensor1", "tensor2"),
    aten.addmm: _fused("addmm", "mat1", "mat2"),
    aten.baddbmm: _fused("baddbmm", "batch1", "batch2"),
    aten.neg: _unary("negate", exact=True),
    aten.mul: _product,
    aten.div: _quotient,
    aten.exp: _unary("log"),
    aten.log: _unary("exp"),
    aten.leaky_relu: _leaky_relu,
    aten.elu: _elu,
    aten._prelu_kernel: _prelu,
    aten._native_batch_norm_legit_functional: _norm("batch_norm"),
    aten._native_batch_norm_legit: _norm("batch_norm"),
    aten._native_batch_norm_legit_no_training: _norm("batch_norm"),
    aten._batch_norm_with_update_functional: _norm("batch_norm"),
    aten.cudnn_batch_norm: _norm("batch_norm"),
    aten.native_layer_norm: _norm("layer_norm"),
    aten.native_group_norm: _norm("group_norm"),
    aten.clone: copied,
    aten._to_copy: copied,
    aten.cat: concatenated,
    aten.stack: stacked,
    aten.constant_pad_nd: padded,
    aten.slice_scatter: scattered,
    aten.index: picked,
    aten.index_select: picked,
    aten.roll: rolled,
    aten.flip: flipped,
    aten.pixel_shuffle: shuffled,
}
"""By ATen op, a function that yields the rules by which arguments of its calls are recomputed."""
