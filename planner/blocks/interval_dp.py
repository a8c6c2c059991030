"""The dynamic program of the strategy `nested_dp` (Beaumont et al. 2019, arXiv:1911.13214), here with several
tensors at a boundary.

C[i, j, m] is the least recomputation cost of blocks i .. j - 1 and their stages within m bytes beyond the
gradients and what earlier blocks keep. It begins with one of two actions; names are those of `BlockChain`:

*save* block i, solve blocks i + 1 .. j - 1, then run stage i:

    m >= entering[j] + saving[i]  (closing[i] if j = i + 1 < n)  and  m >= stage[i] + left[i + 1 .. j - 1]
    C[i + 1, j, m - saved[i]]

*pass* to block s, solve the blocks from s on, then those before s:

    m >= entering[j] + max over k in i .. s - 1 of kept[i, k] + passing[k]
    cost[i .. s - 2] + closing_cost[s - 1] + C[s, j, m - kept[i, s]] + C[i, s, m - left[s .. j - 1]]

Sizes are rounded to units, and the simulator checks the result. Time O(I p K), memory O(I K) for I different
intervals, p positions and K units.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from rematplan.planner.blocks.block_chain import BlockChain
from rematplan.planner.caches.numba_kernels import kernel
from rematplan.planner.core.array_types import Flags, Floats, Ints

Costs32 = NDArray[np.float32]

NEAR = 16
"""A pass over at most this many blocks (running them, and keeping only what later blocks read) may end at any block."""


class Intervals(NamedTuple):
    """The intervals of blocks that the dynamic program solves; equal ones have one number."""

    place: Flags
    """Whether a pass over more than `NEAR` blocks may end in front of each block."""
    row: Ints
    """``row[i, j]``: the number of the interval of blocks i .. j - 1; -1 if it is not solved."""
    first: Ints
    """For each number, the i and j of one such interval, by rising length."""

    @property
    def splits(self) -> int:
        """An estimate of the work of the dynamic program: about how many divisions into two intervals it compares, for
        all different intervals together."""
        before = np.cumsum(self.place)
        i, j = self.first.T
        return int((before[j] - before[i] + np.minimum(j - i, NEAR)).sum())


def intervals(chain: BlockChain, places: Sequence[int]) -> Intervals:
    """Number the intervals of a chain of blocks: intervals of equal blocks and places have one number. O(n²
    log n).

    ``places``: the blocks before which long passes may end, and the end of the chain.
    """
    n = len(chain)
    place = np.zeros(n + 1, dtype=np.bool_)
    place[places] = True
    kinds = 2 * chain.kinds + place[1:]
    row = np.full((n + 1, n + 1), -1, dtype=np.int64)
    first, known = [], 0
    looks = np.zeros(n + 1, dtype=np.int64)  # the numbers of equal intervals that are one block shorter
    for length in range(1, n + 1):
        starts = np.arange(n - length + 1)
        pairs = looks[: len(starts)] * (kinds.max() + 1) + kinds[starts + length - 1]
        _, where, looks = np.unique(pairs, return_index=True, return_inverse=True)
        met = np.ones(len(where), dtype=np.bool_) if length <= NEAR else place[where + length]
        number = np.where(met, known + np.cumsum(met) - 1, -1)
        row[starts, starts + length] = number[looks]
        first.append(np.stack([where[met], where[met] + length], axis=1))
        known += int(met.sum())
    return Intervals(place, row, np.concatenate(first))


class Units(NamedTuple):
    """The costs (shares of the chain's) and bytes (whole memory units) of a `BlockChain`; other fields as there."""

    cost: Floats
    """Prefix sums over the blocks, from 0. ``left``: likewise."""
    closing_cost: Floats
    left: Ints
    saved: Ints
    saving: Ints
    closing: Ints
    stage: Ints
    entering: Ints
    kept: Ints
    """``kept[i, s]``: what stays of blocks i .. s - 1 after a pass."""
    pass_peak: Ints
    """``pass_peak[i, s]``: the peak while blocks i .. s - 1 run in a pass."""
    room: int
    """The most units for which the dynamic program is solved."""


def in_units(chain: BlockChain, most: float, room: int) -> Units:
    """Convert a chain for the dynamic program within up to ``most`` bytes, which are ``room`` units. A unit has at
    least one byte."""
    unit = max(1.0, most / room)

    def rounded(figures: NDArray[Any]) -> Ints:
        return np.rint(figures / unit).astype(np.int64)

    n = len(chain)
    whole = float(chain.cost.sum() + chain.closing_cost.sum()) or 1.0  # shares of it fit into 32 bits
    # The peak of block k in a pass that begins at block i. In floats, since a sum of two sizes may exceed 64 bits.
    running = np.triu(chain.kept[:, :-1].astype(np.float64) + chain.passing)
    pass_peak = np.concatenate([np.zeros((n + 1, 1)), np.maximum.accumulate(running, axis=1)], axis=1)
    return Units(
        cost=np.concatenate([[0.0], np.cumsum(chain.cost / whole)]),
        closing_cost=chain.closing_cost / whole,
        left=np.concatenate([[0], np.cumsum(rounded(chain.left))]),
        saved=rounded(chain.saved),
        saving=rounded(chain.saving),
        closing=rounded(chain.closing),
        stage=rounded(chain.stage),
        entering=rounded(chain.entering),
        kept=rounded(chain.kept),
        pass_peak=rounded(pass_peak),
        room=room,
    )


@dataclass(frozen=True)
class Table:
    """The solution: for each interval of blocks, the least recomputation cost within each number of memory units."""

    units: Units
    alike: Intervals
    cost: Costs32
    """``cost[r, m]``: for intervals with number r within m units, as a share of the chain's costs; infinite
    if m is too few.
    """

    @property
    def whole(self) -> Costs32:
        """For m = 0, 1, ...: the least cost of the whole chain within m units, as a share of its costs;
        infinite if m is too few.
        """
        row: Costs32 = self.cost[self.alike.row[0, -1]]
        return row

    def steps(self, room: int, most: int) -> Ints:
        """Return the cheapest steps of the whole chain within ``room`` units, which must be enough: k is
        block k, -1 - k its backward.

        Empty if there are more than ``most`` steps.
        """
        return _trace(self.units, self.alike, self.cost, room, most)


def solve(units: Units, alike: Intervals) -> Table:
    """Compute the least recomputation cost of each interval of blocks within each number of units up to
    ``units.room``.
    """
    return Table(units, alike, _fill(units, alike))


@kernel
def _fill(u: Units, alike: Intervals) -> Costs32:
    """Return `Table.cost`: by interval, shorter ones first, and by number of units. Each entry is the least cost of
    saving the interval's first block, or of a pass to any later block at which one may end; infinite if the units are
    too few."""
    table = np.full((len(alike.first), u.room + 1), np.inf, dtype=np.float32)
    for row in range(len(table)):
        i, j = alike.first[row]
        out = table[row]
        need = _saving_needs(u, i, j)
        if j == i + 1:
            out[need:] = 0.0
            continue
        rest = table[alike.row[i + 1, j]]
        for m in range(need, u.room + 1):
            out[m] = rest[m - u.saved[i]]
        for s in range(i + 1, j):
            if s > i + NEAR and not alike.place[s]:
                continue
            low, kept, left = _pass_needs(u, i, s, j)
            cost = np.float32(_pass_cost(u, i, s))
            later = table[alike.row[s, j]][low - kept : u.room + 1 - kept]
            sooner = table[alike.row[i, s]][low - left : u.room + 1 - left]
            into = out[low:]
            for m in range(len(into)):  # indices start at 0, so that numba vectorises the loop
                into[m] = min(into[m], cost + later[m] + sooner[m])
    return table


@kernel
def _saving_needs(u: Units, i: int, j: int) -> int:
    """Return the fewest units for blocks i .. j - 1 if block i runs first in the mode saving."""
    runs = u.closing[i] if i + 1 == j < len(u.stage) else u.saving[i]
    rest = u.saved[i] if i + 1 < j else 0
    return int(max(u.entering[j] + runs, u.stage[i] + u.left[j] - u.left[i + 1], rest))


@kernel
def _pass_needs(u: Units, i: int, s: int, j: int) -> tuple[int, int, int]:
    """Return three numbers of units for a pass over blocks i .. s - 1. They are the fewest with which it is possible,
    those unavailable to blocks s .. j - 1, and those unavailable when blocks i .. s - 1 are solved afterwards."""
    kept, left = u.kept[i, s], u.left[j] - u.left[s]
    return int(max(u.entering[j] + u.pass_peak[i, s], kept, left)), int(kept), int(left)


@kernel
def _pass_cost(u: Units, i: int, s: int) -> float:
    return float(u.cost[s - 1] - u.cost[i] + u.closing_cost[s - 1])


@kernel
def _trace(u: Units, alike: Intervals, table: Costs32, room: int, most: int) -> Ints:
    """Return the cheapest steps for ``room`` units, as `Table.steps` says, by finding again the choice that `_fill`
    made for each interval; empty if there are more than ``most``."""
    steps = np.empty(most, dtype=np.int64)
    done = 0
    todo = [(0, len(u.cost) - 1, room)]  # intervals to solve, the next one last; (k, k, 0) is stage k
    while todo:
        i, j, m = todo.pop()
        count = 1 if i == j else _pass_to(u, alike, table, i, j, m) - i
        if done + max(1, count) > most:
            return steps[:0]
        if i == j:
            steps[done] = -1 - i
            done += 1
            continue
        for k in range(i, i + max(1, count)):
            steps[done] = k
            done += 1
        if count == 0:
            todo.append((i, i, 0))
            if j > i + 1:
                todo.append((i + 1, j, m - u.saved[i]))
        else:
            _, kept, left = _pass_needs(u, i, i + count, j)
            todo.append((i, i + count, m - left))
            todo.append((i + count, j, m - kept))
    return steps[:done].copy()


@kernel
def _pass_to(u: Units, alike: Intervals, table: Costs32, i: int, j: int, m: int) -> int:
    """Return how the cheapest solution of blocks i .. j - 1 within m units begins: s > i for a pass to block s, or i
    for saving block i."""
    best, to = np.float32(np.inf), i
    if j == i + 1:
        return to
    if m >= _saving_needs(u, i, j):
        best = table[alike.row[i + 1, j], m - u.saved[i]]
    for s in range(i + 1, j):
        low, kept, left = _pass_needs(u, i, s, j)
        if m >= low and (s <= i + NEAR or alike.place[s]):
            cost = np.float32(_pass_cost(u, i, s))
            cost += table[alike.row[s, j], m - kept] + table[alike.row[i, s], m - left]
            if cost < best:
                best, to = cost, s
    return to
