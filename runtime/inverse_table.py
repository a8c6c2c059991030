"""Which ATen calls can be undone, a row each: from a call's result to one of its arguments, given the others.

Sound rules only. Not here, and why: ReLU, max-pool, dropout and strided convolution lose numbers; reductions and
narrowing casts too; sigmoid and tanh saturate, so that what they lost is most of the number; sine and square have two
arguments for one result; a product with an activation may be a product with zero, unless the activation has bounds.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any, TypeAlias

import torch

from rematplan.runtime.captured_step import Call, CapturedStep, Ref, Value
from rematplan.runtime.inverse_kernels import LEAST_SCALE
from rematplan.runtime.known_values import KnownValues
from rematplan.runtime.ranges import Ranges

aten = torch.ops.aten

ROUNDING = 0.15
"""What one inverse adds to a relative error (root of the mean square), in units of half the last place: less than its
two roundings alone, since errors of different sign cancel along a chain. Measured on chains of 6 to 96 couplings."""
STEEP = 4.0
"""Gain of an ELU's inverse: the root of the mean square of its slope for arguments of unit variance, and some more."""


@dataclass(frozen=True, slots=True)
class Undone:
    """``value`` can be had from ``reads`` by a kernel with these constants.

    ``gain``: the growth of relative errors. ``exact``: numbers are only moved.
    """

    value: str
    reads: tuple[str, ...]
    kernel: str
    constants: tuple[Any, ...] = ()
    gain: float = 1.0
    exact: bool = False


@dataclass(frozen=True, slots=True)
class Refused:
    """A value that would have been undone, were it not for ``why`` (one line for a person)."""

    value: str
    why: str


@dataclass(frozen=True)
class Facts:
    """A step, and which of its values are known before it runs."""

    step: CapturedStep
    known: KnownValues
    scales: dict[str, float] = field(default_factory=dict)

    @cached_property
    def ranges(self) -> Ranges:
        """Bounds of the others."""
        return Ranges(self.step, self.known)

    def arguments(self, call: Call) -> dict[str, Any]:
        """A call's arguments by name, defaults included."""
        found = {}
        for i, a in enumerate(call.target._schema.arguments):  # type: ignore[attr-defined]
            given = call.args[i] if i < len(call.args) else call.kwargs.get(a.name, a.default_value)
            found[a.name] = given
        return found

    def value(self, ref: Ref) -> Value:
        """The value that a reference names."""
        return self.step.values[ref.value]


Found: TypeAlias = Iterator[Undone | Refused]
Row: TypeAlias = Callable[[Call, Facts], Found]


def undo(call: Call, facts: Facts) -> Found:
    """All that can be had back from a call's results, and what cannot for a reason that a person should hear of."""
    packet = getattr(call.target, "overloadpacket", None)
    for row in TABLE.get(packet, ()):
        yield from row(call, facts)


def _result(call: Call, facts: Facts) -> Value:
    return facts.step.values[call.results[0] or ""]


def _fits(x: Any, y: Value, facts: Facts) -> bool:
    """Whether an argument is a real tensor of y's shape that y holds in full precision."""
    if not isinstance(x, Ref):
        return False
    fake = facts.value(x).fake
    return (
        fake.shape == y.fake.shape
        and fake.is_floating_point()
        and y.fake.is_floating_point()
        and torch.finfo(y.fake.dtype).eps <= torch.finfo(fake.dtype).eps
    )


def _sum(sign: int) -> Row:
    """y = first ± alpha · second, the second a tensor or a number."""

    def row(call: Call, facts: Facts) -> Found:
        given, y = facts.arguments(call), _result(call, facts)
        first, second, alpha = given["self"], given["other"], given.get("alpha", 1)
        if _fits(first, y, facts):
            gain = _share(first, facts)
            if isinstance(second, Ref):
                kernel = "subtract" if sign > 0 else "add"
                yield Undone(first.value, (y.name, second.value), kernel, (alpha,), gain)
            else:
                yield Undone(first.value, (y.name,), "shift", (-sign * alpha * second,), gain)
        if _fits(second, y, facts) and isinstance(first, Ref):
            if abs(alpha) < LEAST_SCALE:
                yield Refused(second.value, f"its factor {alpha:g} is below {LEAST_SCALE:g}")
                return
            reads = (y.name, first.value) if sign > 0 else (first.value, y.name)
            yield Undone(
                second.value,
                reads,
                "difference",
                (alpha,),
                _share(second, facts) * max(1.0, 1 / abs(alpha)),
            )
        for one, other in ((first, second), (second, first)):
            if _broadcast_part(one, y, facts) and isinstance(other, Ref):
                shape, whole = list(facts.value(one).fake.shape), list(y.fake.shape)
                yield Refused(one.value, f"its shape {shape} is spread over {whole}: no split to undo")

    return row


def _broadcast_part(x: Any, y: Value, facts: Facts) -> bool:
    """Whether a piece of a larger tensor is spread over y: the halves of an odd number, say."""
    if not isinstance(x, Ref):
        return False
    value = facts.value(x)
    part = value.fake.numel() * value.fake.element_size() < value.fake.untyped_storage().nbytes()
    return part and 1 < value.fake.dim() == y.fake.dim() and value.fake.shape != y.fake.shape


def _reflected(call: Call, facts: Facts) -> Found:
    given, y = facts.arguments(call), _result(call, facts)
    x, c, alpha = given["self"], given["other"], given["alpha"]
    if _fits(x, y, facts) and not isinstance(c, Ref) and abs(alpha) >= LEAST_SCALE:
        yield Undone(x.value, (y.name,), "reflect", (c, alpha), max(1.0, 1 / abs(alpha)))


def _share(x: Ref, facts: Facts) -> float:
    """The gain of undoing a sum for a term that is a scaled tensor: the sum's error, which is as large as the unscaled
    tensor's would be, weighs the more the smaller the scale is."""
    return facts.scales.get(facts.value(x).storage, 1.0)


def _product(call: Call, facts: Facts) -> Found:
    given, y = facts.arguments(call), _result(call, facts)
    for x, factor in ((given["self"], given["other"]), (given["other"], given["self"])):
        if _fits(x, y, facts):
            yield from _scaled(x, factor, y, "divide", facts)


def _quotient(call: Call, facts: Facts) -> Found:
    given, y = facts.arguments(call), _result(call, facts)
    if given.get("rounding_mode") is None and _fits(given["self"], y, facts):
        yield from _scaled(given["self"], given["other"], y, "multiply", facts)


def _scaled(x: Ref, factor: Any, y: Value, kernel: str, facts: Facts) -> Found:
    """y = x · factor, undone by ``divide``, or y = x ÷ factor, undone by ``multiply``."""
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
    if not (least >= LEAST_SCALE and float(sizes.amax()) <= 1 / LEAST_SCALE**2):  # NaN is refused too
        yield Refused(
            x.value,
            f"its scale comes as near zero as {least:.3g}; the least that is inverted is {LEAST_SCALE:g}",
        )
        return
    inverse, direct = _mean_square(1 / sizes), _mean_square(sizes)
    facts.scales[y.storage] = max(1.0, inverse)
    reads = (factor.value,) if isinstance(factor, Ref) else ()
    constants = () if reads else (factor,)
    yield Undone(x.value, (y.name, *reads), kernel, constants, inverse * direct)


def _bounded(x: Ref, factor: Ref, y: Value, kernel: str, facts: Facts) -> Found:
    """The same for a scale that is an activation, where its range keeps away from 0: that of exp(tanh(s)), say.

    What it does to an error on average is taken to be what it does if all its magnitudes are as frequent.
    """
    bounds = facts.ranges(factor)
    ends = bounds.sizes if kernel == "divide" else tuple(1 / e if e else math.inf for e in bounds.sizes[::-1])
    least, most = ends
    if not (least >= LEAST_SCALE and most <= 1 / LEAST_SCALE**2):
        return
    spread = 2 * math.log(most / least)
    inverse, direct = 1 / least, most
    if spread > 1e-6:
        inverse = math.sqrt((least**-2 - most**-2) / spread)
        direct = math.sqrt((most**2 - least**2) / spread)
    facts.scales[y.storage] = max(1.0, inverse)
    if kernel == "divide" and bounds.lasting:
        kernel = "quotient"  # nothing to watch at run time
    yield Undone(x.value, (y.name, factor.value), kernel, (), inverse * direct)


def _mean_square(t: torch.Tensor) -> float:
    return math.sqrt(float(t.square().mean()))


def _unary(kernel: str, gain: float = 1.0, exact: bool = False) -> Row:
    """y = f(self), undone by a kernel without constants."""

    def row(call: Call, facts: Facts) -> Found:
        x, y = facts.arguments(call)["self"], _result(call, facts)
        if _fits(x, y, facts):
            yield Undone(x.value, (y.name,), kernel, (), gain, exact)

    return row


def _leaky_relu(call: Call, facts: Facts) -> Found:
    given, y = facts.arguments(call), _result(call, facts)
    x, slope = given["self"], given["negative_slope"]
    if _fits(x, y, facts):
        if slope >= LEAST_SCALE:
            yield Undone(x.value, (y.name,), "leaky_relu", (slope,))
        else:
            yield Refused(x.value, f"the slope {slope:g} of its leaky ReLU is below {LEAST_SCALE:g}")


def _elu(call: Call, facts: Facts) -> Found:
    given, y = facts.arguments(call), _result(call, facts)
    constants = tuple(given[name] for name in ("alpha", "scale", "input_scale"))
    if _fits(given["self"], y, facts) and min(constants) >= LEAST_SCALE:
        yield Undone(given["self"].value, (y.name,), "elu", constants, STEEP)


def _prelu(call: Call, facts: Facts) -> Found:
    given, y = facts.arguments(call), _result(call, facts)
    x, weight = given["self"], given["weight"]
    slopes = facts.known(weight.value)
    if _fits(x, y, facts) and slopes is not None:
        least = float(slopes.amin())
        if least >= LEAST_SCALE:
            yield Undone(x.value, (y.name, weight.value), "prelu", (), max(1.0, _mean_square(1 / slopes)))
        else:
            yield Refused(x.value, f"a slope of its PReLU is {least:.3g}, below {LEAST_SCALE:g}")


def _norm(kernel: str, x: str = "input") -> Row:
    """A normalisation that gives its statistics too, or (a frozen batch norm) uses given ones."""

    def row(call: Call, facts: Facts) -> Found:
        given, y = facts.arguments(call), _result(call, facts)
        if not _fits(given[x], y, facts):
            return
        gain, affine, has = 1.0, [], []
        for name in ("weight", "bias"):
            ref = given.get(name)
            has.append(isinstance(ref, Ref))
            affine += [ref.value] if isinstance(ref, Ref) else []
        if has[0]:
            weight = facts.known(affine[0])
            if weight is None:
                return
            least = float(weight.abs().amin())
            if not least >= LEAST_SCALE:
                why = f"a weight of its norm is {least:.3g}; the least that is inverted is {LEAST_SCALE:g}"
                yield Refused(given[x].value, why)
                return
            gain = _mean_square(weight) * _mean_square(1 / weight)
        frozen = call.target is aten._native_batch_norm_legit_no_training.default
        statistics = (
            (given["running_mean"].value, given["running_var"].value)
            if frozen
            else (call.results[1], call.results[2])
        )
        eps: tuple[float | None, ...] = (
            ((given["eps"] if frozen else None),) if kernel == "batch_norm" else ()
        )
        if all(statistics):
            reads = (y.name, *(s for s in statistics if s), *affine)
            yield Undone(given[x].value, reads, kernel, (*has, *eps), gain)

    return row


def _copied(call: Call, facts: Facts) -> Found:
    """A copy, also one into a wider type: the numbers are all there."""
    x, y = facts.arguments(call)["self"], _result(call, facts)
    if not isinstance(x, Ref):
        return
    a, b = facts.value(x).fake, y.fake
    if a.shape == b.shape and a.device == b.device and (a.dtype == b.dtype or _fits(x, y, facts)):
        yield Undone(x.value, (y.name,), "copy", exact=True)


def _concatenated(call: Call, facts: Facts) -> Found:
    given, y = facts.arguments(call), _result(call, facts)
    start = 0
    for x in given["tensors"]:
        fake = facts.value(x).fake
        if fake.dim() != y.fake.dim():  # an old kind of empty tensor
            continue
        end = start + fake.shape[given["dim"]]
        if fake.dtype == y.fake.dtype:
            yield Undone(x.value, (y.name,), "slice", (((given["dim"], start, end, 1),),), exact=True)
        start = end


def _stacked(call: Call, facts: Facts) -> Found:
    given, y = facts.arguments(call), _result(call, facts)
    for index, x in enumerate(given["tensors"]):
        if facts.value(x).fake.dtype == y.fake.dtype:
            yield Undone(x.value, (y.name,), "select", (given["dim"], index), exact=True)


def _padded(call: Call, facts: Facts) -> Found:
    given, y = facts.arguments(call), _result(call, facts)
    x, pad = given["self"], given["pad"]
    if all(p >= 0 for p in pad):
        fake = facts.value(x).fake
        dims = [fake.dim() - 1 - i // 2 for i in range(0, len(pad), 2)]
        ranges = tuple((d, p, p + fake.shape[d], 1) for d, p in zip(dims, pad[::2], strict=True))
        yield Undone(x.value, (y.name,), "slice", (ranges,), exact=True)


def _scattered(call: Call, facts: Facts) -> Found:
    """A tensor written into a slice of another: it stands there."""
    given, y = facts.arguments(call), _result(call, facts)
    whole = y.fake.shape[given["dim"]]
    start = 0 if given["start"] is None else given["start"]
    end = whole if given["end"] is None else min(given["end"], whole)
    yield Undone(
        given["src"].value, (y.name,), "slice", (((given["dim"], start, end, given["step"]),),), exact=True
    )


def _rolled(call: Call, facts: Facts) -> Found:
    given, y = facts.arguments(call), _result(call, facts)
    back = tuple(-s for s in given["shifts"])
    yield Undone(given["self"].value, (y.name,), "roll", (back, tuple(given["dims"])), exact=True)


def _flipped(call: Call, facts: Facts) -> Found:
    given, y = facts.arguments(call), _result(call, facts)
    yield Undone(given["self"].value, (y.name,), "flip", (tuple(given["dims"]),), exact=True)


def _shuffled(call: Call, facts: Facts) -> Found:
    given, y = facts.arguments(call), _result(call, facts)
    yield Undone(given["self"].value, (y.name,), "pixel_unshuffle", (given["upscale_factor"],), exact=True)


TABLE: Mapping[Any, tuple[Row, ...]] = {
    aten.add: (_sum(+1),),
    aten.sub: (_sum(-1),),
    aten.rsub: (_reflected,),
    aten.neg: (_unary("negate", exact=True),),
    aten.mul: (_product,),
    aten.div: (_quotient,),
    aten.exp: (_unary("log"),),
    aten.log: (_unary("exp"),),
    aten.leaky_relu: (_leaky_relu,),
    aten.elu: (_elu,),
    aten._prelu_kernel: (_prelu,),
    aten._native_batch_norm_legit_functional: (_norm("batch_norm"),),
    aten._native_batch_norm_legit: (_norm("batch_norm"),),
    aten._native_batch_norm_legit_no_training: (_norm("batch_norm"),),
    aten._batch_norm_with_update_functional: (_norm("batch_norm"),),
    aten.cudnn_batch_norm: (_norm("batch_norm"),),
    aten.native_layer_norm: (_norm("layer_norm"),),
    aten.native_group_norm: (_norm("group_norm"),),
    aten.clone: (_copied,),
    aten._to_copy: (_copied,),
    aten.cat: (_concatenated,),
    aten.stack: (_stacked,),
    aten.constant_pad_nd: (_padded,),
    aten.slice_scatter: (_scattered,),
    aten.roll: (_rolled,),
    aten.flip: (_flipped,),
    aten.pixel_shuffle: (_shuffled,),
}
"""Rows by ATen op."""
