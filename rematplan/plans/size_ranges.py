"""The planning problems of a step at all sizes of one dimension, captured at some sizes and interpolated between
them."""

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
    """The planning problems of one step at all sizes of one dimension.

    ``dimension``: the dimension's name. ``sizes``: in ascending order. ``captured``: by size, the problems at the
    sizes at which the step was captured. ``spans``: interpolations. Each computes the problems at the sizes between
    its smallest and its largest captured size.
    """

    dimension: str
    sizes: tuple[int, ...]
    captured: dict[int, TrainingGraph]
    spans: tuple[Between, ...]

    def problem(self, size: int) -> TrainingGraph:
        """Return the problem at ``size``, which must be one of ``sizes``."""
        if size in self.captured:
            return self.captured[size]
        return self._span(size).problem(size)

    def amounts(self, size: int) -> tuple[str, Amounts]:
        """Return a hash of the ops and tensors of the problem at ``size``, and the problem's amounts.

        The amounts are the bytes of each tensor, and the workspace and cost of each op.
        """
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
    """Capture a step at as few sizes as are needed to know its planning problem at all sizes of one dimension.

    If there are at most `EACH` sizes, all are captured. Otherwise some are captured, and the sizes between them are
    interpolated if captured problems have the same ops and the bytes of each tensor are a polynomial of the size.
    Sizes that cannot be interpolated are captured. That happens where ops differ, as they often do at size 1, or
    where tensors are padded to rounded sizes.
    """
    captured = {size: capture(size) for size in _samples(sizes)}
    spans = [] if len(captured) == len(sizes) else interpolations(captured)
    for size in sizes:
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
    """Return the sizes at which a step is captured first.

    If there are at most `EACH` sizes, all are returned. Otherwise: the first three, the last two, and three between,
    of which not all have the same parity.
    """
    if len(sizes) <= EACH:
        return list(sizes)
    last = len(sizes) - 1
    middle = last // 2
    places = {0, 1, 2, last // 4, middle + (middle - last // 4 + 1) % 2, 3 * last // 4, last - 1, last}
    return [sizes[at] for at in sorted(places)]


def interpolations(captured: Mapping[int, TrainingGraph]) -> list[Between]:
    """Return interpolations of the problems between captured sizes.

    ``captured``: problems by size. Neighbouring sizes whose problems have the same ops are interpolated together, if
    the bytes of their tensors allow it.
    """
    found = []
    for _, rows in groupby(sorted(captured.items()), key=lambda row: row[1].fingerprint):
        if span := between(dict(rows)):
            found.append(span)
    return found
