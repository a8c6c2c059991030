"""Bounds of values for all inputs, by interval arithmetic: a tanh is in [−1, 1], its exponential in [1/e, e]."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch

from rematplan.runtime.graph.captured_step import Call, CapturedStep, Ref
from rematplan.runtime.graph.constant_values import KnownValues

aten = torch.ops.aten

DEEPEST = 24
"""The longest chain of calls that is followed to derive a range."""


@dataclass(frozen=True, slots=True)
class Range:
    """An interval that contains every element of a tensor, except NaNs, or a number."""

    low: float = -math.inf
    """The lower end, included."""
    high: float = math.inf
    """The upper end, included."""
    lasting: bool = True
    """Whether the interval still holds after training has changed the parameters."""

    def of(self, *ends: float) -> Range:
        """Return the smallest interval with the numbers ``ends``, as lasting as this; unbounded if one is NaN."""
        if any(map(math.isnan, ends)):
            return Range(lasting=self.lasting)
        return Range(min(ends), max(ends), self.lasting)

    @property
    def sizes(self) -> tuple[float, float]:
        """The smallest and the largest absolute value in the interval."""
        ends = abs(self.low), abs(self.high)
        return (0.0 if self.low <= 0 <= self.high else min(ends)), max(ends)


class Ranges:
    """The intervals that contain the elements of a captured step's values for every batch, derived on demand.
    ``known``: the present contents of parameters, buffers and constants."""

    def __init__(self, step: CapturedStep, known: KnownValues) -> None:
        self.step, self.known = step, known

    def __call__(self, value: Any, depth: int = DEEPEST) -> Range:
        """Return the range of a number, or of a value by its `Ref`; unbounded if no rule applies. ``depth``: the number
        of calls that may be followed, beyond which the range is unbounded."""
        if not isinstance(value, Ref):
            return Range() if isinstance(value, complex) else Range(float(value), float(value))
        fake, tensor = self.step.values[value.value].fake, self.known(value.value)
        if fake.is_complex():
            return Range()
        if tensor is not None and tensor.numel():
            low, high = (float(end) for end in torch.aminmax(tensor.double()))
            return Range(low, high, value.value in self.step.constants).of(low, high)
        call = self.step.call.get(self.step.values[value.value].call or "")
        if call is None or not depth:
            return Range()
        if call.is_view:
            of = call.args[0]  # its bits may be read as another type
            same = self.step.values[of.value].fake.dtype == fake.dtype
            return self(of, depth - 1) if same else Range()
        row = ROWS.get(getattr(call.target, "overloadpacket", None))
        return row(call, lambda v: self(v, depth - 1)) if row else Range()


Row = Callable[[Call, Callable[[Any], Range]], Range]
"""A rule for the range of an op's result: a function of the call, and of a function that returns the range of an
argument."""


def _within(low: float, high: float) -> Row:
    return lambda call, of: Range(low, high)


def _rising(f: Callable[[float], float]) -> Row:
    """Return the rule for an op that computes a nondecreasing function ``f`` of its first argument."""

    def row(call: Call, of: Callable[[Any], Range]) -> Range:
        x = of(call.args[0])
        return x.of(f(x.low), f(x.high))

    return row


def _exp(x: float) -> float:
    try:
        return math.exp(x)
    except OverflowError:
        return math.inf


def _copied(call: Call, of: Callable[[Any], Range]) -> Range:
    """Return the range of a copy: its ends are rounded like its elements. A copy to integers cuts fractions off, and
    what is too large for the type becomes any number."""
    x, dtype = of(call.args[0]), call.arguments()["dtype"]
    if dtype is None:
        return x
    if not dtype.is_floating_point:
        return Range()
    return x.of(*torch.tensor([x.low, x.high], dtype=torch.float64).to(dtype).tolist())


def _sum(sign: int) -> Row:
    def row(call: Call, of: Callable[[Any], Range]) -> Range:
        a, b = of(call.args[0]), of(call.args[1])
        by = sign * call.arguments()["alpha"]
        ends = (a.low + by * b.low, a.low + by * b.high, a.high + by * b.low, a.high + by * b.high)
        return Range(lasting=a.lasting and b.lasting).of(*ends)

    return row


def _product(call: Call, of: Callable[[Any], Range]) -> Range:
    a, b = of(call.args[0]), of(call.args[1])
    ends = (x * y for x in (a.low, a.high) for y in (b.low, b.high))
    return Range(lasting=a.lasting and b.lasting).of(*ends)


def _quotient(call: Call, of: Callable[[Any], Range]) -> Range:
    a, b = of(call.args[0]), of(call.args[1])
    if b.low <= 0 <= b.high or call.arguments().get("rounding_mode"):
        return Range()
    ends = (x / y for x in (a.low, a.high) for y in (b.low, b.high))
    return Range(lasting=a.lasting and b.lasting).of(*ends)


def _clamped(call: Call, of: Callable[[Any], Range]) -> Range:
    x, limits = of(call.args[0]), call.arguments()
    low, high = limits["min"], limits.get("max")
    if isinstance(low, Ref) or isinstance(high, Ref):
        return Range()
    low, high = (-math.inf if low is None else low), (math.inf if high is None else high)
    return x.of(min(max(x.low, low), high), min(max(x.high, low), high))


ROWS: Mapping[Any, Row] = {
    aten.tanh: _within(-1, 1),
    aten.sigmoid: _within(0, 1),
    aten.hardsigmoid: _within(0, 1),
    aten._softmax: _within(0, 1),
    aten.erf: _within(-1, 1),
    aten.sin: _within(-1, 1),
    aten.cos: _within(-1, 1),
    aten.softplus: lambda call, of: Range(0 if call.arguments()["beta"] > 0 else -math.inf),
    aten.hardtanh: lambda call, of: Range(call.arguments()["min_val"], call.arguments()["max_val"]),
    aten.clamp: _clamped,
    aten.clamp_min: _clamped,
    aten.relu: _rising(lambda x: max(x, 0.0)),
    aten.exp: _rising(_exp),
    aten.atan: _within(-math.pi / 2, math.pi / 2),
    aten.neg: lambda call, of: (x := of(call.args[0])).of(-x.low, -x.high),
    aten.add: _sum(+1),
    aten.sub: _sum(-1),
    aten.mul: _product,
    aten.div: _quotient,
    aten.clone: lambda call, of: of(call.args[0]),
    aten._to_copy: _copied,
}
"""How to derive the range of a result from those of the arguments, by ATen op."""
