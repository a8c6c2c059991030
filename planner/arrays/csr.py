"""The planning problem as numpy arrays in compressed sparse rows, for compiled loops."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import accumulate
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from rematplan.ir import TrainingGraph
from rematplan.planner.arrays.indexed import indexed
from rematplan.planner.caches.graph_cache import cached_on
from rematplan.planner.core.array_types import Flags, Ints


class CSRGraph(NamedTuple):
    """A planning problem as arrays for compiled loops, with ops and tensors by position. Its ``reads`` leave out
    inputs, since they are always resident.
    """

    reads_at: Ints
    """Op o reads ``reads[reads_at[o] : reads_at[o + 1]]``."""
    reads: Ints
    writes_at: Ints
    """Op o writes ``writes[writes_at[o] : writes_at[o + 1]]``."""
    writes: Ints
    producer: Ints
    """By tensor: the op that writes it, -1 for an input."""
    after: Ints
    """By op: the op before it in ``graph.ordered``; -1 for the first there, and for ops that are not there."""
    forward: Flags
    """By op: whether it is of the forward half."""
    bytes: Ints
    workspace: Ints
    cost: NDArray[np.float64]
    wanted: Flags
    """By tensor: whether it is an output that some op writes."""
    input_bytes: int
    """The bytes of all inputs together."""


def traffic_of(graph: TrainingGraph) -> CSRGraph:
    """Return the problem as numpy arrays in compressed sparse rows. They are computed once per graph object."""
    return cached_on(graph, "traffic", lambda: _traffic(graph))


def _traffic(graph: TrainingGraph) -> CSRGraph:
    ix = indexed(graph)
    producer = np.array(ix.producer, dtype=np.int64)
    reads_at, reads = compressed_rows([[t for t in row if ix.producer[t] >= 0] for row in ix.reads])
    writes_at, writes = compressed_rows(ix.writes)
    return CSRGraph(
        reads_at=reads_at,
        reads=reads,
        writes_at=writes_at,
        writes=writes,
        producer=producer,
        after=np.array(ix.after, dtype=np.int64),
        forward=np.array(ix.forward, dtype=np.bool_),
        bytes=np.array(ix.bytes, dtype=np.int64),
        workspace=np.array([o.workspace for o in graph.ops], dtype=np.int64),
        cost=np.array(ix.cost, dtype=np.float64),
        wanted=np.array(ix.is_output, dtype=np.bool_) & (producer >= 0),
        input_bytes=graph.input_bytes,
    )


def compressed_rows(rows: Sequence[Sequence[int]]) -> tuple[Ints, Ints]:
    """Convert lists of different lengths to compressed sparse rows (starts, items): list i is
    ``items[starts[i]:starts[i + 1]]``."""
    starts = np.array([0, *accumulate(map(len, rows))], dtype=np.int64)
    return starts, np.array([x for row in rows for x in row], dtype=np.int64)
