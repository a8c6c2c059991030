"""Descent by groups: regress neighbouring demanded tensors while the others stay, always over the lowest hill
to a smaller set.

A search over hundreds of tensors at once, such as all gradients, would expand too many states.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np

from rematplan.planner.core.effort import Effort
from rematplan.planner.least.demands import NEVER, Tables
from rematplan.planner.least.regression import certified, search

WIDTHS = (1, 2, 3, 4, 6, 8, 12, 16, 24, 32, 48)
"""The numbers of tensors in a group that are tried, the smallest first."""
MOVES_PER_SEARCH, TENSORS_PER_MOVE = 10, 250
"""A search counts as so many moves, and one more for each so many tensors that it looks at."""


@dataclass(frozen=True)
class GroupDescent:
    """The actions back in time from a set of demanded tensors (an op, or -1 - t where tensor t is computed from
    nothing)."""

    peak_of_actions: int
    """Bytes within which the actions are possible."""
    level: int
    """Bytes within which, in addition, the rest can be computed from nothing."""
    actions: list[int]
    rest: list[int]
    """The tensors demanded at the end."""


def descend_by_groups(
    tables: Tables, start: Sequence[int], level: int, limit: int, effort: Effort
) -> GroupDescent:
    """Replace groups of demanded tensors, from ``start``, by what they are computed from. End when the rest can be
    computed from nothing within the level, no group lowers the bytes that this takes, or ``effort`` is spent.
    ``level``: bytes to begin with. ``limit``: states to expand for one group."""
    actions: list[int] = []
    demanded = list(start)
    frozen = np.zeros(tables.size.size, np.bool_)
    while demanded and not effort.over:
        peak = certified(tables, demanded)
        if peak <= level:
            break
        size = int(tables.size[demanded].sum())
        demanded.sort(key=lambda t: tables.maker[t])
        best = None
        for group in _groups(demanded):
            frozen[demanded], frozen[group] = True, False
            found = search(tables, np.array(demanded, np.int64), frozen, level, size, limit, True, level)
            frozen[demanded] = False
            effort.charge(moves=work_of(int(found[2])))
            if found[0] < NEVER and (best is None or found[0] < best[0]):
                best = found
            if found[0] <= level or effort.over:
                break
        if best is None or best[0] >= peak:
            break
        level = max(level, int(best[0]))
        actions += best[3].tolist()
        demanded = best[4].tolist()
    return GroupDescent(level, max(level, certified(tables, demanded)), actions, demanded)


def work_of(looked: int) -> int:
    """Return how many moves of the effort one search takes. ``looked``: the number of tensors that it looked at."""
    return MOVES_PER_SEARCH + looked // TENSORS_PER_MOVE


def _groups(demanded: Sequence[int]) -> Iterator[list[int]]:
    """Yield groups of neighbours, overlapping by half."""
    for width in WIDTHS:
        step = max(1, width // 2)
        for at in range(0, len(demanded) - width + step, step) if width <= len(demanded) else ():
            yield list(demanded[at : at + width])
