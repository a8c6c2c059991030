"""What the rows of the table of inverses are given and what they say."""

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
    """``value`` can be had from ``reads`` by a kernel with these constants.

    ``gain``: the growth of relative errors. ``exact``: numbers are only moved. ``scale``: what the kernel returns for
    the scale that it divides by, where training may change that; else 0.
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


def result(call: Call, facts: Facts) -> Value:
    """What a call makes, or the first of that."""
    return facts.step.values[call.results[0] or ""]


def fits(x: Any, y: Value, facts: Facts) -> bool:
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
