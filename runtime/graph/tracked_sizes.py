"""Sizes that know which expression of the batch's sizes they are the value of.

A step for given sizes has plain integers. One that comes from an expression is a `TrackedSize`, which generated
source takes as an argument.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields, is_dataclass
from typing import Any

import torch

SizeValues = Sequence[int]
"""The values of all expressions of a step with open sizes, by position."""


@dataclass(frozen=True, eq=False)
class OpenSizes:
    """The expressions whose values are the tracked sizes of a step."""

    expressions: Mapping[Any, int]
    """The position of each SymPy expression. The batch's sizes, which are the symbols in them, are there, too."""
    values: SizeValues
    """The values of the expressions for the batch of the step, by position."""


class TrackedSize(int):
    """An integer that is the value of the expression at position ``at``. Arithmetic gives plain integers."""

    at: int

    def __new__(cls, value: int, at: int) -> TrackedSize:
        """Return the value of an expression at a position."""
        made = super().__new__(cls, value)
        made.at = at
        return made

    def __getnewargs__(self) -> tuple[int, int]:  # type: ignore[override]
        return int(self), self.at


def track(fake: torch.Tensor, shape: Sequence[int], stride: Sequence[int]) -> None:
    """Attach to a fake tensor its tracked sizes and strides; do nothing if none is tracked."""
    if any(type(size) is TrackedSize for size in (*shape, *stride)):
        fake.tracked = tuple(shape), tuple(stride)  # type: ignore[attr-defined]


def shape_of(fake: torch.Tensor) -> tuple[int, ...]:
    """Return the shape of a fake tensor, with tracked sizes where they are known."""
    found: tuple[int, ...] = getattr(fake, "tracked", (tuple(fake.shape),))[0]
    return found


def stride_of(fake: torch.Tensor) -> tuple[int, ...]:
    """Return the strides of a fake tensor, with tracked ones where they are known."""
    found: tuple[int, ...] = getattr(fake, "tracked", (None, fake.stride()))[1]
    return found


def at_sizes(given: Any, sizes: SizeValues) -> Any:
    """Return a nested tuple with plain integers: the values of other sizes in place of tracked ones."""
    if isinstance(given, tuple):
        return tuple(at_sizes(one, sizes) for one in given)
    return sizes[given.at] if isinstance(given, TrackedSize) else given


def has_tracked(given: Any) -> bool:
    """Return whether a value is a tracked size, or a tuple, list or dataclass that contains one at any depth."""
    if isinstance(given, (str, float, type(None))):
        return False
    if isinstance(given, (tuple, list)):
        return any(map(has_tracked, given))
    if is_dataclass(given) and not isinstance(given, type):
        return any(has_tracked(getattr(given, one.name)) for one in fields(given))
    return isinstance(given, TrackedSize)


def without_values(given: Any) -> Any:
    """Return a hashable form of nested arguments; arguments that differ only in the values of tracked sizes have equal
    forms. The numbers 1, 1.0 and True have different forms."""
    if isinstance(given, TrackedSize):
        return TrackedSize, given.at
    if isinstance(given, (tuple, list)):
        return type(given), *map(without_values, given)
    if isinstance(given, dict):
        return tuple((key, without_values(one)) for key, one in given.items())
    if has_tracked(given):  # a dataclass
        return type(given), *(without_values(getattr(given, one.name)) for one in fields(given))
    return type(given), repr(given) if isinstance(given, float) else given
