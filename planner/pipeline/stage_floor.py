"""A floor of a stage's time within a memory budget, for every interval of a chain: cheap, and proven.

With k micro-batches in flight a rank holds k times what its stage keeps between forward and backward, so that a plan
keeps at most κ = (budget − states) ÷ k − (what leaves). What the backward reads and the plan does not keep, it makes
again: the ops that made it run once more. So the extra time is at least that of all such ops less the most time that κ
bytes can save, which the fractional knapsack bounds from above (Dantzig 1957). Where a graph has inverses, a tensor may
come back more cheaply, and the floor is the time without recomputation.
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
    """Forward ops of which the backward reads something that does not leave its block's stage: their block, the last
    block to which it goes, its bytes, and the op's cost; by falling cost a byte."""

    block: Ints
    up: Ints
    bytes: Ints
    cost: Costs


def time_floors(
    chain: StageChain, room: Callable[[int, int, int], tuple[float, int]]
) -> Callable[[int, int, int], float]:
    """The floor of a stage's time for a micro-batch, microseconds, as a function of (first block, block behind the
    last, stage); infinite where no plan fits.

    Args:
        room: the bytes that a stage of such blocks may hold between forward and backward for all micro-batches
            together, and the most that are in flight.
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
    """The least time of what is not kept."""
    if kept < 0:
        return math.inf
    inside = (saved.block >= start) & (saved.up < end)
    sizes, costs = saved.bytes[inside], saved.cost[inside]
    filled = np.cumsum(sizes)
    if not len(filled) or filled[-1] <= kept:
        return 0.0
    at = int(np.searchsorted(filled, kept, side="right"))  # the first op that is not kept whole
    part = (filled[at] - kept) / sizes[at]
    return float(costs[at + 1 :].sum() + part * costs[at])


def _saved(chain: StageChain) -> _Saved:
    ix = indexed(chain.graph)
    rows = []
    for o, forward in enumerate(ix.forward):
        if not forward:
            continue
        block = chain.block[o]
        # Only what the backward of the op's own block reads counts: that is in every stage which has the op.
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
