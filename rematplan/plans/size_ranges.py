"""A step's planning problems at all sizes of one dimension, captured at some and interpolated between them."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from itertools import groupby

from rematplan.ir import TrainingGraph
from rematplan.planner.family.amounts_by_position import Amounts, amounts_of
from rematplan.planner.family.interpolated_problems import Between, between

EACH = 12
"""If a range has at most this many sizes, the step is captured at each of them."""


@dataclass(frozen=True, eq=False)
class ProblemRange:
    """The planning problems of one step at all sizes of one dimension."""

    dimension: str
    """The dimension's name."""
    sizes: tuple[int, ...]
    """The sizes in ascending order."""
    captured: dict[int, TrainingGraph]
    """By size, the problems at the sizes at which the step was captured."""
    spans: tuple[Between, ...]
    """Interpolations, each between its smallest and its largest captured size."""

    def problem(self, size: int) -> TrainingGraph:
        """Return the problem at ``size``, which must be one of ``sizes``."""
        if size in self.captured:
            return self.captured[size]
        return self._span(size).problem(size)

    def amounts(self, size: int) -> tuple[str, Amounts]:
        """Return a hash of the ops and tensors of the problem at ``size``, and its bytes, workspaces and costs."""
        if size in self.captured:
            return self.captured[size].structure, amounts_of(self.captured[size])
        span = self._span(size)
        return span.captured[span.sizes[0]].structure, span.amounts(size)

    def _span(self, size: int) -> Between:
        (span,) = (span for span in self.spans if span.sizes[0] < size < span.sizes[-1])
        return span


def problems_over(
    dimension: str, sizes: Sequence[int], capture: Callable[[int], TrainingGraph]
) -> ProblemRange:
    """Return a step's problems at all ``sizes``, in ascending order: captured at a few of them, or at all if at most
    `EACH`, and also wherever interpolation is impossible."""
    captured = {size: capture(size) for size in _samples(sizes)}
    spans = [] if len(captured) == len(sizes) else interpolations(captured)
    for size in sizes:
        # Ops may differ, as at size 1, or tensors be padded to rounded sizes.
        if size not in captured and not any(span.sizes[0] < size < span.sizes[-1] for span in spans):
            captured[size] = capture(size)
    return ProblemRange(dimension, tuple(sizes), dict(sorted(captured.items())), tuple(spans))


def show_sizes(sizes: Sequence[int]) -> str:
    """Return whole numbers in ascending order as text with ranges, such as ``1, 40..64``. Empty if there are none."""
    parts: list[list[int]] = []
    for size in sizes:
        if parts and parts[-1][-1] == size - 1:
            parts[-1].append(size)
        else:
            parts.append([size])
    return ", ".join(str(p[0]) if len(p) == 1 else f"{p[0]}..{p[-1]}" for p in parts)


def _samples(sizes: Sequence[int]) -> list[int]:
    """Return the sizes to capture first: all if there are at most `EACH`, else eight, five of them at the ends."""
    if len(sizes) <= EACH:
        return list(sizes)
    last = len(sizes) - 1
    middle = last // 2
    # Where odd and even sizes have other ops or paddings, the quarter and the middle show both: their distance is odd.
    places = {0, 1, 2, last // 4, middle + (middle - last // 4 + 1) % 2, 3 * last // 4, last - 1, last}
    return [sizes[at] for at in sorted(places)]


def interpolations(captured: Mapping[int, TrainingGraph]) -> list[Between]:
    """Return interpolations between neighbouring sizes whose problems have the same ops, where bytes allow it."""
    found = []
    for _, rows in groupby(sorted(captured.items()), key=lambda row: row[1].fingerprint):
        if span := between(dict(rows)):
            found.append(span)
    return found
