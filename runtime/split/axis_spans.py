"""Where a tensor has an axis: a span of its dimensions."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import TypeAlias

Shape: TypeAlias = tuple[int, ...]


@dataclass(frozen=True)
class AxisSpan:
    """Where a tensor has the axis: flattened dimensions ``first`` to ``last``, entry i at index i // ``inner``."""

    first: int
    last: int
    inner: int = 1

    def of_part(self, shape: Sequence[int], indices: int) -> Shape:
        """Return the shape of a part of ``indices`` indices, of the same rank: the span's last dimension has the
        entries, the others size 1."""
        ones = (1,) * (self.last - self.first)
        return (*shape[: self.first], *ones, indices * self.inner, *shape[self.last + 1 :])


def through_view(old: Shape, new: Shape, span: AxisSpan, indices: int) -> AxisSpan | None:
    """Return where a tensor has the axis after a reshape; None if the axis is not separate dimensions then.
    ``indices``: the length of the axis."""
    before = math.prod(old[: span.first])
    first, product = 0, 1
    while first < len(new) and (product < before or new[first] == 1):
        product *= new[first]
        first += 1
    entries = 1
    for last in range(first, len(new)):
        entries *= new[last]
        if product == before and entries % indices == 0:
            return AxisSpan(first, last, entries // indices)
    return None


def trimmed(shape: Shape, span: AxisSpan) -> AxisSpan:
    """Return the span without dimensions of size 1 at its ends: a tensor then has one span for an axis only."""
    first, last = span.first, span.last
    while first < last and shape[first] == 1:
        first += 1
    while last > first and shape[last] == 1:
        last -= 1
    return AxisSpan(first, last, span.inner)


def axes_of(shape: Sequence[int]) -> Iterable[AxisSpan]:
    """Return the axes of a tensor along which it may be split: each dimension, and the leading ones together."""
    rank = len(shape)
    spans = [AxisSpan(d, d) for d in range(rank)] + [AxisSpan(0, d) for d in range(1, rank - 1)]
    return [
        s
        for s in dict.fromkeys(trimmed(tuple(shape), s) for s in spans)
        if math.prod(shape[s.first : s.last + 1]) > 1
    ]
