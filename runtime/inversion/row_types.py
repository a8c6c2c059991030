"""The types that rows of the inverse table take and return. A row is a function that yields, for a call, the rules by
which its arguments are recomputed from its result."""

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
    """A rule that recomputes a value, by a kernel, from other values that were computed from it.

    ``value``: the name of the value. ``reads``: the names of the values that the kernel reads. ``kernel``: its name in
    `inverse_ops.KERNELS`. ``constants``: its arguments that are not tensors. ``gain``: the factor by which it
    multiplies relative errors. ``exact``: whether it recomputes the original bits, since it only copies, moves or
    negates numbers. ``scale``: the factor by which dividing by a scale increases errors at planning time; 0 without a
    scale. If the kernel returns the factor at run time, the two are compared.
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
    """A value that cannot be recomputed from later values for a reason that a user can change.

    ``value``: its name. ``why``: the reason, in one line.
    """

    value: str
    why: str


@dataclass(frozen=True)
class Facts:
    """A captured step, with what is known about its values before it runs.

    ``step``: the step. ``known``: the real tensors of values that are computed only from parameters, buffers and
    constants. ``scales``: for each storage that is the result of a product or quotient that can be undone, by storage
    name, the factor by which undoing it multiplies errors (at least 1). The rows of the inverse table fill it.
    """

    step: CapturedStep
    known: KnownValues
    scales: dict[str, float] = field(default_factory=dict)

    @cached_property
    def ranges(self) -> Ranges:
        """Intervals that contain the elements of the step's values for all inputs, derived on demand."""
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
"""What a row of the inverse table yields for a call: rules, and arguments that cannot be recomputed."""
Row: TypeAlias = Callable[[Call, Facts], Found]
"""A row of the inverse table."""


def result(call: Call, facts: Facts) -> Value:
    """Return the first result of a call."""
    return facts.step.values[call.results[0] or ""]


def fits(x: Any, y: Value, facts: Facts) -> bool:
    """Return whether an argument of a call has the shape of its result ``y`` and can be recomputed from it without loss
    of precision or range: both are floating-point tensors, and every number of the type of ``x`` is one of ``y``'s.
    """
    if not isinstance(x, Ref):
        return False
    fake = facts.value(x).fake
    return (
        fake.shape == y.fake.shape
        and fake.is_floating_point()
        and y.fake.is_floating_point()
        and _includes(torch.finfo(y.fake.dtype), torch.finfo(fake.dtype))
    )


def _includes(wide: torch.finfo, narrow: torch.finfo) -> bool:
    """Return whether a floating-point type has all numbers of another one: float16 has a higher precision than
    bfloat16, but a smaller range."""
    return (
        wide.eps <= narrow.eps
        and wide.max >= narrow.max
        and wide.smallest_normal * wide.eps
        <= narrow.smallest_normal * narrow.eps  # the smallest numbers above 0
    )
