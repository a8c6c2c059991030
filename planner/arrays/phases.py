"""Recognise a training step whose ops are not marked as forward or backward.

The backward half reads the forward half's tensors in the opposite order: what was written last is read first. No
other kind of graph does so as strictly: the rank correlation is below -0.99 for networks, and above -0.8 for random
layered graphs in depth-first order.
"""

from __future__ import annotations

from dataclasses import replace

import numpy as np
from numpy.typing import NDArray

from rematplan.ir import TrainingGraph
from rematplan.planner.arrays.indexed import Indexed, indexed
from rematplan.planner.caches.graph_cache import cached_on

FEWEST = 8
"""If fewer tensors than this are live between the halves, their order proves nothing."""
MIRRORED = -0.95
"""The graph is a training step if the rank correlation, between the time a tensor is written and the time it is
read next, is at most this."""

Floats = NDArray[np.float64]


def infer_phases(graph: TrainingGraph) -> TrainingGraph:
    """Return a problem whose ops are marked as forward or backward.

    A problem that has such marks already, or does not look like a training step, is returned unchanged.

    Phases only tell the search where to look. They do not change which schedules are valid.
    """
    turn = -1 if graph.has_phases else _turn(indexed(graph))
    if turn < 0:
        return graph

    def marked() -> TrainingGraph:
        ops = (replace(op, phase="forward" if at <= turn else "backward") for at, op in enumerate(graph.ops))
        return replace(graph, ops=tuple(ops))

    return cached_on(graph, "with turn", marked)


def _turn(ix: Indexed) -> int:
    """Return the last forward op if the graph looks like a training step, else -1.

    It is the op after which most tensors are still to be read; they must be read in the opposite order of writing.
    """
    spans = [(p, reads[-1]) for p, reads in zip(ix.producer, ix.readers, strict=True) if p >= 0 and reads]
    waiting = np.zeros(len(ix.ops) + 1, dtype=np.int64)
    for written, last in spans:
        waiting[written] += 1
        waiting[last] -= 1
    if not spans:
        return -1
    turn = int(np.cumsum(waiting).argmax())
    across = [
        (p, next(r for r in reads if r > turn))
        for p, reads in zip(ix.producer, ix.readers, strict=True)
        if 0 <= p <= turn and reads and reads[-1] > turn
    ]
    if len(across) < FEWEST:
        return -1
    when = [_ranks(np.array(column)) for column in zip(*across, strict=True)]
    return turn if _correlation(*when) <= MIRRORED else -1


def _ranks(values: NDArray[np.int64]) -> Floats:
    """Return ranks; equal values get the mean of their ranks."""
    _, where, counts = np.unique(values, return_inverse=True, return_counts=True)
    means: Floats = np.cumsum(counts) - (counts - 1) / 2
    return means[where]


def _correlation(a: Floats, b: Floats) -> float:
    """Return the correlation of two rankings; 0 if all values of one are equal."""
    a, b = a - a.mean(), b - b.mean()
    size = float(np.sqrt((a @ a) * (b @ b)))
    return float(a @ b) / size if size else 0.0
