"""Lower bounds of a stage's time within a budget, for each interval of blocks that may become a stage.

With k micro-batches in flight, a stage keeps at most κ = (budget − states) ÷ k − (messages) bytes. The
backward's operands beyond κ are recomputed; the fractional knapsack bounds the time that κ bytes save
(Dantzig 1957).

An inverse may be faster than the op, so with inverses the bound is the time without recomputation.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np

from rematplan.planner.arrays.indexed import Indexed, indexed
from rematplan.planner.core.array_types import Floats, Ints
from rematplan.planner.pipeline.stage_chain import StageChain


@dataclass(frozen=True)
class _Saved:
    """Forward ops whose results the backward of their block reads, by cost per byte of these results,
    descending.

    Results that are outputs, and ops that no output depends on, are left out.
    """

    block: Ints
    """The block of each op."""
    up: Ints
    """The last block that reads the results."""
    bytes: Ints
    """The bytes of those results that the backward reads."""
    cost: Floats
    """The microseconds of each op."""


def time_floors(
    chain: StageChain, room: Callable[[int, int, int], tuple[float, int]]
) -> Callable[[int, int, int], float]:
    """Return a function of (first block, block after the last, stage): a lower bound of the stage's microseconds per
    micro-batch. ``room`` takes the same, and returns the bytes for all micro-batches in flight and their number. If the
    bytes are negative, the bound is infinite, except with inverses."""
    saved = _saved(chain)
    inverses = bool(chain.graph.inverses)
    known: dict[tuple[int, int, int], float] = {}

    def floor(start: int, end: int, stage: int) -> float:
        key = (start, end, stage)
        if key not in known:
            base = chain.forward[end] - chain.forward[start] + (chain.backward[end] - chain.backward[start])
            bytes_, in_flight = room(start, end, stage)
            known[key] = base + (0.0 if inverses else _extra(saved, start, end, bytes_ / max(1, in_flight)))
        return known[key]

    return floor


def _extra(saved: _Saved, start: int, end: int, kept: float) -> float:
    """Return a lower bound of the microseconds recomputed in blocks ``start`` to ``end`` - 1. ``kept``: the most
    bytes that stay from forward to backward; the bound is infinite if it is negative."""
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
    """Return the forward ops whose results, except outputs, the backward of their block reads, by falling cost per
    byte. Ops that no output depends on, and results of 0 bytes, are left out."""
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
    """Return the positions of the forward ops that an output of the step depends on: each plan runs them in
    the stage's forward.
    """
    found: set[int] = set()
    for o in reversed([o for o, forward in enumerate(ix.forward) if forward]):
        if any(ix.is_output[t] or not found.isdisjoint(ix.readers[t]) for t in ix.writes[o]):
            found.add(o)
    return found
