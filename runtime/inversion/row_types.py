"""The types of the inverse table's rows: functions that yield, for a call, the rules that recompute its arguments
from its result."""

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
    """A rule that recomputes a value, by a kernel, from other values that were computed from it."""

    value: str
    """The name of the value."""
    reads: tuple[str, ...]
    """The names of the values that the kernel reads."""
    kernel: str
    """The kernel's name in `inverse_ops.KERNELS`."""
    constants: tuple[Any, ...] = ()
    """The kernel's arguments that are not tensors."""
    gain: float = 1.0
    """The factor by which the kernel multiplies relative errors."""
    exact: bool = False
    """Whether the kernel recomputes the original bits, since it only copies, moves or negates numbers."""
    scale: float = 0.0
    """The factor by which dividing by a scale increases errors at planning time; 0 without a scale. If the kernel
    returns the factor at run time, the two are compared."""


@dataclass(frozen=True, slots=True)
class Refused:
    """A value that cannot be recomputed from later values for a reason, in one line, that a user can change."""

    value: str
    """The value's name."""
    why: str
    """The reason, in one line."""


@dataclass(frozen=True)
class Facts:
    """A captured step, with what is known about its values before it runs."""

    step: CapturedStep
    """The step."""
    known: KnownValues
    """The real tensors of values that are computed only from parameters, buffers and constants."""
    scales: dict[str, float] = field(default_factory=dict)
    """By storage of a product or quotient that can be undone, the factor, at least 1, on errors. Rows fill it."""

    @cached_property
    def ranges(self) -> Ranges:
        """Intervals that contain the elements of the step's values for all inputs, derived on demand."""
        return Ranges(self.step, self.known)

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
    """Return whether argument ``x`` has the shape of the result ``y``, and the result's floating-point type holds
    every number of its type; false for a number."""
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
