"""Lower bounds of a stage's time within a memory budget, for every interval of a chain's blocks.

With k micro-batches in flight, a rank holds k times the bytes that its stage keeps between forward and backward. So a
plan keeps at most κ = (budget − states) ÷ k − (bytes that leave the stage). What the backward reads and the plan does
not keep is recomputed: the ops that computed it run again. So the extra time is at least the time of all such ops,
minus the most time that κ bytes can save; the fractional knapsack bounds the latter from above (Dantzig 1957). An
inverse may recover a tensor in less time, so in graphs with inverses the bound is the time without recomputation.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from rematplan.planner.arrays.indexed import indexed
from rematplan.planner.pipeline.stage_chain import StageChain

Ints = NDArray[np.int64]
Costs = NDArray[np.float64]


@dataclass(frozen=True)
class _Saved:
    """The results of forward ops that the backward reads, one row per op, sorted by the op's cost per byte of them,
    descending.

    ``block``: the op's block. ``up``: the last block that reads its results. ``bytes``: of these results. ``cost``:
    the op's, in microseconds.
    """

    block: Ints
    up: Ints
    bytes: Ints
    cost: Costs


def time_floors(
    chain: StageChain, room: Callable[[int, int, int], tuple[float, int]]
) -> Callable[[int, int, int], float]:
    """Return a function that returns a lower bound of the time of a stage for one micro-batch, in microseconds.

    That function takes the stage's first block, the block after its last one, and the stage's number. It returns
    infinity if it is proven that no plan fits.

    Args:
        chain: the blocks of the training step.
        room: for the same three arguments, returns the bytes that the stage may hold between forward and backward for
            all micro-batches together, and the largest number of micro-batches in flight.
    """
    saved = _saved(chain)
    inverses = bool(chain.graph.inverses)
    known: dict[tuple[int, int, int], float] = {}

    def floor(start: int, end: int, stage: int) -> float:
        key = (start, end, stage)
        if key not in known:
            base = _between(chain.forward, start, end) + _between(chain.backward, start, end)
            bytes_, in_flight = room(start, end, stage)
            known[key] = base + (0.0 if inverses else _extra(saved, start, end, bytes_ / max(1, in_flight)))
        return known[key]

    return floor


def _between(sums: tuple[float, ...], start: int, end: int) -> float:
    return sums[end] - sums[start]


def _extra(saved: _Saved, start: int, end: int, kept: float) -> float:
    """Return the least time for recomputing what is not kept in a stage of blocks ``start`` to ``end`` - 1 that keeps
    at most ``kept`` bytes; infinity if ``kept`` is negative."""
    if kept < 0:
        return math.inf
    inside = (saved.block >= start) & (saved.up < end)
    sizes, costs = saved.bytes[inside], saved.cost[inside]
    filled = np.cumsum(sizes)
    if not len(filled) or filled[-1] <= kept:
        return 0.0
    at = int(np.searchsorted(filled, kept, side="right"))  # the first op whose result is not kept whole
    part = (filled[at] - kept) / sizes[at]
    return float(costs[at + 1 :].sum() + part * costs[at])


def _saved(chain: StageChain) -> _Saved:
    ix = indexed(chain.graph)
    rows = []
    for o, forward in enumerate(ix.forward):
        if not forward:
            continue
        block = chain.block[o]
        # Only reads by the backward of the op's own block count: every stage with the op has those.
        own = [
            t
            for t in ix.writes[o]
            if any(not ix.forward[r] and chain.block[r] == block for r in ix.readers[t])
        ]
        own = [t for t in own if not ix.is_output[t]]
        size = sum(ix.bytes[t] for t in own)
        if size:
            up = max(chain.block[r] for t in own for r in ix.readers[t])
            rows.append((block, max(block, up), size, ix.cost[o]))
    rows.sort(key=lambda row: -row[3] / row[2])
    table = np.array([row[:3] for row in rows], dtype=np.int64).reshape(-1, 3).T
    return _Saved(table[0], table[1], table[2], np.array([row[3] for row in rows], dtype=np.float64))
