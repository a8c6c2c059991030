"""Price a run sequence without making its schedule, to choose among many candidates.

The simulator prices every plan that is returned; this is the same peak in one backward scan (`with_frees` and
`simulate` at once), for the hundreds of candidates that are only compared. A test holds the two equal.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from rematplan.ir import TrainingGraph
from rematplan.planner.indexed import indexed
from rematplan.planner.kernel import kernel
from rematplan.planner.memo import remember

Ints = NDArray[np.int64]


class Traffic(NamedTuple):
    """What ops touch, as arrays: op o reads ``reads[reads_at[o] : reads_at[o + 1]]``, and so for its writes.

    Inputs, which are resident anyway, are left out. ``wanted``: the outputs, to be resident at the end.
    """

    reads_at: Ints
    reads: Ints
    writes_at: Ints
    writes: Ints
    bytes: Ints
    workspace: Ints
    cost: NDArray[np.float64]
    wanted: NDArray[np.bool_]
    input_bytes: int


def price_runs(graph: TrainingGraph, runs: Sequence[int]) -> tuple[int, float]:
    """Peak (bytes, inputs included) and cost of a run sequence, by base positions. O(reads + writes)."""
    traffic = remember(graph, "traffic", lambda: _traffic(graph))
    peak, cost = _scan(traffic, np.array(runs, dtype=np.int64))
    return int(peak), float(cost)


def _traffic(graph: TrainingGraph) -> Traffic:
    ix = indexed(graph)
    reads_at, reads = _rows([[t for t in row if ix.producer[t] >= 0] for row in ix.reads])
    writes_at, writes = _rows(ix.writes)
    return Traffic(
        reads_at=reads_at,
        reads=reads,
        writes_at=writes_at,
        writes=writes,
        bytes=np.array(ix.bytes, dtype=np.int64),
        workspace=np.array([o.workspace for o in graph.ops], dtype=np.int64),
        cost=np.array(ix.cost, dtype=np.float64),
        wanted=np.array(
            [out and p >= 0 for out, p in zip(ix.is_output, ix.producer, strict=True)], dtype=np.bool_
        ),
        input_bytes=graph.input_bytes,
    )


def _rows(rows: Sequence[Sequence[int]]) -> tuple[Ints, Ints]:
    at = np.cumsum([0, *map(len, rows)]).astype(np.int64)
    return at, np.array([t for row in rows for t in row], dtype=np.int64)


@kernel
def _scan(traffic: Traffic, runs: Ints) -> tuple[int, float]:
    """Backward over the runs: ``wanted`` are the tensors whose next event is a read, ``held`` their bytes."""
    wanted = traffic.wanted.copy()
    held, cost = traffic.input_bytes, 0.0
    for t in range(len(wanted)):
        if wanted[t]:
            held += traffic.bytes[t]
    peak = traffic.input_bytes
    for at in range(len(runs) - 1, -1, -1):
        o = runs[at]
        cost += traffic.cost[o]
        reads = traffic.reads[traffic.reads_at[o] : traffic.reads_at[o + 1]]
        writes = traffic.writes[traffic.writes_at[o] : traffic.writes_at[o + 1]]
        for t in reads:  # resident while the op runs, whether or not anything reads them later
            if not wanted[t]:
                wanted[t] = True
                held += traffic.bytes[t]
        before = held
        for t in writes:
            if wanted[t]:
                wanted[t] = False
                before -= traffic.bytes[t]
            else:
                held += traffic.bytes[t]
        peak = max(peak, held + traffic.workspace[o])
        held = before
    return peak, cost
