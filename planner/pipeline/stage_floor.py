"""Lower bounds of the time of a pipeline stage within a memory budget, for every interval of blocks that may become a
stage.

With k micro-batches in flight, a rank holds k times the bytes that its stage keeps between forward and backward. So a
plan keeps at most κ = (budget − states) ÷ k − (bytes of the stage's output) of other tensors. Tensors that the backward
reads and that are not kept must be recomputed: the ops that computed them run again. So the time of recomputation is at
least the time of all these ops, minus the most time that κ kept bytes can save. The optimum of the fractional knapsack
problem is an upper bound of the time saved (Dantzig 1957). Ops that no output depends on do not count: a plan may run
them for the first time in the backward. An inverse may recover a tensor in less time than its op takes. So in graphs
with inverses the lower bound is the time without recomputation.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from rematplan.planner.arrays.indexed import Indexed, indexed
from rematplan.planner.pipeline.stage_chain import StageChain

Ints = NDArray[np.int64]
Costs = NDArray[np.float64]


@dataclass(frozen=True)
class _Saved:
    """The forward ops that an output of the step depends on and whose results the backward of the same block reads, one
    row for each op. Results that are outputs themselves are left out. The rows are sorted by the op's cost per byte of
    these results, descending.

    ``block``: the op's block. ``up``: the last block that reads the results. ``bytes``: the bytes of the results.
    ``cost``: the op's microseconds.
    """

    block: Ints
    up: Ints
    bytes: Ints
    cost: Costs


def time_floors(
    chain: StageChain, room: Callable[[int, int, int], tuple[float, int]]
) -> Callable[[int, int, int], float]:
    """Return a function that computes a lower bound of the microseconds that a stage takes for one micro-batch.

    Both the returned function and ``room`` take the stage's first block, the block after its last one, and the stage's
    number. The lower bound is infinite if ``room`` returns negative bytes, because then no plan fits. In graphs with
    inverses it is never infinite: it is the time without recomputation.
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
    """Return a lower bound of the microseconds of recomputation in a stage that keeps at most ``kept`` bytes for a
    micro-batch between forward and backward; infinity if ``kept`` is negative.

    ``saved``: the forward ops whose results the backward reads. ``start``, ``end``: the stage's first block, and the
    block after its last one.
    """
    if kept < 0:
        return math.inf
    inside = (saved.block >= start) & (saved.up < end)
    sizes, costs = saved.bytes[inside], saved.cost[inside]
    filled = np.cumsum(sizes)
    if not len(filled) or filled[-1] <= kept:
        return 0.0
    at = int(np.searchsorted(filled, kept, side="right"))  # the first op whose results are not all kept
    part = (filled[at] - kept) / sizes[at]
    return float(costs[at + 1 :].sum() + part * costs[at])


def _saved(chain: StageChain) -> _Saved:
    ix = indexed(chain.graph)
    rows = []
    for o in sorted(_before_boundary(ix)):
        block = chain.block[o]
        # Only reads by the backward of the op's block count: every stage that has the op has these reads.
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


def _before_boundary(ix: Indexed) -> set[int]:
    """Return the positions of the forward ops that run between the start of a stage's forward and its end in every
    plan: those that an output of the step depends on."""
    found: set[int] = set()
    for o in reversed([o for o, forward in enumerate(ix.forward) if forward]):
        if any(ix.is_output[t] or not found.isdisjoint(ix.readers[t]) for t in ix.writes[o]):
            found.add(o)
    return found
