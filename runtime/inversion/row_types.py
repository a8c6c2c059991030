"""The types that rows of the inverse table take and return."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any, TypeAlias

import torch

from rematplan.runtime.graph.captured_step import Call, CapturedStep, Ref, Value
from rematplan.runtime.graph.constant_values import KnownValues
from rematplan.runtime.graph.value_ranges import Ranges


@dataclass(frozen=True, slots=True)
class Undone:
    """A rule that recovers a value: a kernel recomputes it from other values.

    ``value``: the name of the value. ``reads``: the names of the values that the kernel reads. ``kernel``: its name
    in `inverse_ops.KERNELS`. ``constants``: its further arguments. ``gain``: the factor by which it multiplies
    relative errors. ``exact``: whether it only moves numbers. ``scale``: the factor by which dividing by a scale
    increases errors, as the kernel returned it at planning time; 0 if the kernel divides by no scale that training
    may change.
    """

    value: str
    reads: tuple[str, ...]
    kernel: str
    constants: tuple[Any, ...] = ()
    gain: float = 1.0
    exact: bool = False
    scale: float = 0.0


@dataclass(frozen=True, slots=True)
class Refused:
    """A value that cannot be recovered for a reason that a user can change.

    ``value``: its name. ``why``: the reason, in one line.
    """

    value: str
    why: str


@dataclass(frozen=True)
class Facts:
    """A captured step, with what is known about its values before it runs.

    ``step``: the step. ``known``: the real tensors of values that are computed only from parameters, buffers and
    constants. ``scales``: for storages that are scaled tensors, by name, the factor by which undoing the scaling
    multiplies errors; rows of the inverse table add to it.
    """

    step: CapturedStep
    known: KnownValues
    scales: dict[str, float] = field(default_factory=dict)

    @cached_property
    def ranges(self) -> Ranges:
        """Intervals that contain the values of the step for all inputs, derived on demand."""
        return Ranges(self.step, self.known)

    def arguments(self, call: Call) -> dict[str, Any]:
        """Return a call's arguments by the names in the op's schema, defaults included."""
        found = {}
        for i, a in enumerate(call.target._schema.arguments):  # type: ignore[attr-defined]
            value = call.args[i] if i < len(call.args) else call.kwargs.get(a.name, a.default_value)
            found[a.name] = value
        return found

    def value(self, ref: Ref) -> Value:
        """Return the value to which a `Ref` refers."""
        return self.step.values[ref.value]


Found: TypeAlias = Iterator[Undone | Refused]
Row: TypeAlias = Callable[[Call, Facts], Found]


def result(call: Call, facts: Facts) -> Value:
    """Return the first result of a call."""
    return facts.step.values[call.results[0] or ""]


def fits(x: Any, y: Value, facts: Facts) -> bool:
    """Return whether ``x``, an argument of a call, is a floating-point tensor with the shape of ``y`` that has no
    more precision than ``y``, so that it can be recomputed from ``y``."""
    if not isinstance(x, Ref):
        return False
    fake = facts.value(x).fake
    return (
        fake.shape == y.fake.shape
        and fake.is_floating_point()
        and y.fake.is_floating_point()
        and torch.finfo(y.fake.dtype).eps <= torch.finfo(fake.dtype).eps
    )
