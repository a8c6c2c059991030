"""The dynamic program of the strategy `nested_dp`, over intervals of a chain of blocks.

Source: Beaumont, Eyraud-Dubois, Herrmann, Joly, Shilova, «Optimal checkpointing for heterogeneous chains», 2019,
arXiv:1911.13214. For a chain of equal layers the plans are those of Revolve (Griewank and Walther 2000). Unlike there,
several tensors may be resident at the boundary of two blocks, and some of them may also be resident at earlier
boundaries (skip connections).

C[i, j, m] is the least recomputation cost of blocks i .. j - 1 and their backward stages j - 1 .. i. At the start,
resident are what blocks before i keep for later ones, and the gradients that enter stage j - 1. m bytes are available
for everything else. The first action is one of the following two. The names are fields of `BlockChain`, and n is the
number of blocks.

- *save* block i: run it and keep all that its stage reads. Then solve blocks i + 1 .. j - 1, then run stage i::

    m >= entering[j] + saving[i]  (closing[i] if j = i + 1 < n)  and  m >= stage[i] + left[i + 1 .. j - 1]
    C[i + 1, j, m - saved[i]]

- *pass* to block s: run blocks i .. s - 1 and keep only what later blocks read. Then solve the blocks from s on, then
  those before s::

    m >= entering[j] + max over k in i .. s - 1 of kept[i, k] + passing[k]
    cost[i .. s - 2] + closing_cost[s - 1] + C[s, j, m - kept[i, s]] + C[i, s, m - left[s .. j - 1]]

Bytes are counted in units, and each size is rounded to the nearest number of units. Errors mostly cancel, and the
simulator checks the result. A pass over more than `NEAR` blocks ends only at positions that the caller chooses. Equal
intervals are solved once. Time O(I p K) and memory O(I K), for I different intervals, p positions and K units. If no
two intervals are equal, I is about n p for n blocks.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from rematplan.planner.arrays.csr import Flags, Ints
from rematplan.planner.blocks.block_chain import BlockChain
from rematplan.planner.caches.numba_kernels import kernel

Floats = NDArray[np.float32]
Costs = NDArray[np.float64]

NEAR = 16
"""A pass over at most this many blocks (running them, and keeping only what later blocks read) may end at any block."""


class Intervals(NamedTuple):
    """The intervals of a chain of blocks for which the dynamic program computes a solution, and which of them are
    equal.

    ``row[i, j]``: a number for the interval of blocks i .. j - 1, the same for equal intervals; -1 if no solution is
    computed. ``first``: for each number, the i and j of one interval that has it, by increasing length. ``place[s]``:
    whether a pass over more than `NEAR` blocks may end in front of block s. A pass runs blocks and keeps only what
    later blocks read.
    """

    place: Flags
    row: Ints
    first: Ints

    @property
    def splits(self) -> int:
        """An estimate of the work of the dynamic program: about how many divisions into two intervals it compares, for
        all different intervals together."""
        before = np.cumsum(self.place)
        i, j = self.first.T
        return int((before[j] - before[i] + np.minimum(j - i, NEAR)).sum())


def intervals(chain: BlockChain, places: Sequence[int]) -> Intervals:
    """Number the intervals of a chain of blocks. Two intervals get the same number if their blocks are equal in costs
    and bytes, and if passes may end at the same positions in them. O(n² log n) for n blocks.

    ``places``: the blocks in front of which a pass over more than `NEAR` blocks may end, and the end of the chain.
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
    """The costs and bytes of a `BlockChain`, converted for the dynamic program. Costs are shares of the sum of the
    chain's costs. Sizes are whole numbers of memory units.

    ``cost``, ``left``: prefix sums over the blocks, from 0. ``pass_peak[i, s]``: the peak while blocks i .. s - 1 run
    and keep only what later blocks read. ``kept[i, s]``: what stays resident of these blocks afterwards. ``room``: the
    largest number of units for which the dynamic program is solved. ``closing_cost``, ``saved``, ``saving``,
    ``closing``, ``stage``, ``entering``: as in `BlockChain`.
    """

    cost: Costs
    closing_cost: Costs
    left: Ints
    saved: Ints
    saving: Ints
    closing: Ints
    stage: Ints
    entering: Ints
    kept: Ints
    pass_peak: Ints
    room: int


def in_units(chain: BlockChain, most: float, room: int) -> Units:
    """Convert the costs and bytes of a chain of blocks for the dynamic program. Sizes become whole numbers of units. A
    unit is ``most`` / ``room`` bytes, but at least one byte."""
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
    """The solution of the dynamic program: for each interval of blocks, the least recomputation cost within each number
    of memory units.

    ``cost[r, m]``: the least cost with m units for the intervals with number r. It is a share of the sum of the chain's
    costs, and infinite if m units are too few. ``alike``: the numbers of the intervals. ``units``: the costs and bytes
    of the chain.
    """

    units: Units
    alike: Intervals
    cost: Floats

    @property
    def whole(self) -> Floats:
        """For m = 0, 1, ...: the least recomputation cost of the whole chain of blocks within m units of memory. It is
        a share of the sum of the chain's costs, and infinite if m units are too few."""
        row: Floats = self.cost[self.alike.row[0, -1]]
        return row

    def steps(self, room: int, most: int) -> Ints:
        """Return the cheapest sequence of steps for the whole chain within ``room`` units of memory, which must be
        enough. A step k is an execution of block k, and -1 - k is the backward of block k.

        The result is empty if the sequence has more than ``most`` steps.
        """
        return _trace(self.units, self.alike, self.cost, room, most)


def solve(units: Units, alike: Intervals) -> Table:
    """Compute the least recomputation cost of every interval of blocks within every number of memory units up to
    ``units.room``.

    ``units``: the costs and bytes of the chain. ``alike``: the intervals, of which equal ones have the same number.
    """
    return Table(units, alike, _fill(units, alike))


@kernel
def _fill(u: Units, alike: Intervals) -> Floats:
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
    """Return the fewest memory units for blocks i .. j - 1 if block i is run first and all that its backward stage
    reads stays resident."""
    runs = u.closing[i] if i + 1 == j < len(u.stage) else u.saving[i]
    rest = u.saved[i] if i + 1 < j else 0
    return int(max(u.entering[j] + runs, u.stage[i] + u.left[j] - u.left[i + 1], rest))


@kernel
def _pass_needs(u: Units, i: int, s: int, j: int) -> tuple[int, int, int]:
    """Return three numbers of memory units, for running blocks i .. s - 1 at the start of an interval that ends at
    block j - 1, keeping only what later blocks read.

    These are: the fewest units that this needs; the units that are not available to blocks s .. j - 1 afterwards; and
    the units that are not available to blocks i .. s - 1 when they are recomputed.
    """
    kept, left = u.kept[i, s], u.left[j] - u.left[s]
    return int(max(u.entering[j] + u.pass_peak[i, s], kept, left)), int(kept), int(left)


@kernel
def _pass_cost(u: Units, i: int, s: int) -> float:
    return float(u.cost[s - 1] - u.cost[i] + u.closing_cost[s - 1])


@kernel
def _trace(u: Units, alike: Intervals, table: Floats, room: int, most: int) -> Ints:
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
def _pass_to(u: Units, alike: Intervals, table: Floats, i: int, j: int, m: int) -> int:
    """Return how the cheapest solution for blocks i .. j - 1 within m memory units begins.

    If the result is a block s > i, it runs blocks i .. s - 1 and keeps only what later blocks read. If the result is i,
    it runs block i and keeps all that its stage reads. ``table``: the least cost of each interval within each number of
    units.
    """
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
