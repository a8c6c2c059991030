"""The dynamic program over intervals of blocks behind `nested_dp`.

Beaumont, Eyraud-Dubois, Herrmann, Joly, Shilova, «Optimal checkpointing for heterogeneous chains», 2019,
arXiv:1911.13214; for a chain of equal layers the plans are those of Revolve (Griewank and Walther 2000). Here a
boundary may consist of several tensors, some of which earlier boundaries hold already (skip connections).

C[i, j, m] is the least recomputation cost to get from the state «everything that blocks before i keep is kept, and
the gradients that enter stage j - 1» to the state «stages j - 1 .. i are done», with m bytes for everything else.
The first action is one of two (n is that of `BlockChain`):

- *save* block i: run it and hold all that its stage reads, then blocks i + 1 .. j - 1, then stage i::

      m >= entering[j] + saving[i]  (closing[i] if j = i + 1 < n)  and  m >= stage[i] + left[i + 1 .. j - 1]
      C[i + 1, j, m - saved[i]]

- *pass* to block s: run blocks i .. s - 1 and hold only what later ones read of them::

      m >= entering[j] + max over k in i .. s - 1 of kept[i, k] + passing[k]
      cost[i .. s - 2] + closing_cost[s - 1] + C[s, j, m - kept[i, s]] + C[i, s, m - left[s .. j - 1]]

Bytes are counted in units, each figure rounded to the nearest; errors cancel, and the simulator checks the result.
Long passes end at given places only. Intervals of equal blocks are solved once. Time O(I p K) and memory O(I K) for
I different intervals (n p, for n blocks and p places, if no two are equal) and K units.
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
"""A pass over at most this many blocks may end anywhere."""


class Intervals(NamedTuple):
    """The intervals of blocks that the dynamic program visits, and which of them are equal.

    ``place[s]``: whether a long pass may end in front of block s (a pass runs blocks and keeps only what later
    blocks read); a pass over at most `NEAR` blocks may end anywhere. ``row[i, j]``: the number of the interval of
    blocks i .. j - 1; equal intervals have the same number; -1 if it is not visited. ``first``: for each number, the
    i and j of one interval with that number, by increasing length.
    """

    place: Flags
    row: Ints
    first: Ints

    @property
    def splits(self) -> int:
        """About how many ways there are to split all different intervals in two; the program's work is proportional
        to it."""
        before = np.cumsum(self.place)
        i, j = self.first.T
        return int((before[j] - before[i] + np.minimum(j - i, NEAR)).sum())


def intervals(chain: BlockChain, places: Sequence[int]) -> Intervals:
    """Number the intervals of blocks of a chain. Two have the same number if their blocks are equal in cost and
    bytes and passes may end at the same places. O(n² log n) for n blocks.

    ``places``: the blocks in front of which long passes may end, the chain's end included.
    """
    n = len(chain)
    place = np.zeros(n + 1, dtype=np.bool_)
    place[places] = True
    kinds = 2 * chain.kinds + place[1:]
    row = np.full((n + 1, n + 1), -1, dtype=np.int64)
    first, known = [], 0
    looks = np.zeros(n + 1, dtype=np.int64)  # of the intervals one shorter
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
    """The costs and bytes of a `BlockChain` for the dynamic program: costs as shares of their sum, bytes as whole
    numbers of units.

    ``cost`` and ``left`` are prefix sums over the blocks. ``pass_peak[i, s]``: the peak while blocks i .. s - 1 run
    and keep only what later blocks read. ``kept[i, s]``: the bytes that these blocks then keep. ``room``: the
    largest number of units. ``closing_cost``, ``saved``, ``saving``, ``closing``, ``stage``, ``entering``: as in
    `BlockChain`.
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
    """Convert the costs and bytes of a chain for the dynamic program: ``room`` units of memory stand for ``most``
    bytes."""
    unit = max(1.0, most / room)

    def rounded(figures: NDArray[Any]) -> Ints:
        return np.rint(figures / unit).astype(np.int64)

    n = len(chain)
    whole = float(chain.cost.sum() + chain.closing_cost.sum()) or 1.0  # shares of it fit into 32 bits
    # Of block k in a pass from block i; in floats, since a sum of two sizes may be more than 64 bits hold.
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
    """The least recomputation cost C[i, j, m] of every interval of blocks i .. j - 1 with every number m of memory
    units.

    ``cost[r, m]``: C for the interval with the number r (see `Intervals`), as a share of the sum of all costs;
    infinite if nothing fits. ``units``: the chain's costs and bytes. ``alike``: the intervals.
    """

    units: Units
    alike: Intervals
    cost: Floats

    @property
    def whole(self) -> Floats:
        """The least recomputation cost of the whole chain with m units of memory, for m = 0, 1, ..., as shares of
        the sum of all costs; infinite if nothing fits."""
        row: Floats = self.cost[self.alike.row[0, -1]]
        return row

    def steps(self, room: int, most: int) -> Ints:
        """Return a cheapest sequence of steps with ``room`` units of memory: k stands for a run of block k, -1 - k
        for the backward of block k.

        Empty if there are more than ``most`` steps.
        """
        return _trace(self.units, self.alike, self.cost, room, most)


def solve(units: Units, alike: Intervals) -> Table:
    """Compute the least recomputation cost of every interval of blocks, for every number of memory units. ``alike``:
    which intervals are equal."""
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
            for m in range(len(into)):  # from 0 on, so that it is done several at a time
                into[m] = min(into[m], cost + later[m] + sooner[m])
    return table


@kernel
def _saving_needs(u: Units, i: int, j: int) -> int:
    """Return the least number of units with which block i can be saved."""
    runs = u.closing[i] if i + 1 == j < len(u.stage) else u.saving[i]
    rest = u.saved[i] if i + 1 < j else 0
    return int(max(u.entering[j] + runs, u.stage[i] + u.left[j] - u.left[i + 1], rest))


@kernel
def _pass_needs(u: Units, i: int, s: int, j: int) -> tuple[int, int, int]:
    """Return the least number of units for a pass to block s, and by how much the pass reduces the units for the
    later and for the earlier blocks."""
    kept, left = u.kept[i, s], u.left[j] - u.left[s]
    return int(max(u.entering[j] + u.pass_peak[i, s], kept, left)), int(kept), int(left)


@kernel
def _pass_cost(u: Units, i: int, s: int) -> float:
    return float(u.cost[s - 1] - u.cost[i] + u.closing_cost[s - 1])


@kernel
def _trace(u: Units, alike: Intervals, table: Floats, room: int, most: int) -> Ints:
    steps = np.empty(most, dtype=np.int64)
    done = 0
    todo = [(0, len(u.cost) - 1, room)]  # intervals to come, the next one last; of stage k, (k, k, 0)
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
    """Return the block to pass to with m units; i itself if block i should be saved."""
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
