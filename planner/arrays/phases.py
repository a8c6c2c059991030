"""Tell a training step that does not say which of its ops are its backward half.

A step's backward reads what its forward wrote in the opposite order: what was written last is read first. No other
graph does it so strictly: rank correlations are below -0.99 for networks, above -0.8 for random layered graphs in
depth-first order.
"""

from __future__ import annotations

from dataclasses import replace

import numpy as np
from numpy.typing import NDArray

from rematplan.ir import TrainingGraph
from rematplan.planner.arrays.indexed import Indexed, indexed
from rematplan.planner.caches.graph_cache import cached_on

FEWEST = 8
"""Tensors held at the turn below which their order says nothing."""
MIRRORED = -0.95
"""The rank correlation, of when they were written and when they are read next, up to which it is a backward that reads
them."""

Floats = NDArray[np.float64]


def infer_phases(graph: TrainingGraph) -> TrainingGraph:
    """The problem with its ops' phases, if it has none and looks like a training step; else itself.

    Phases say where to look for plans and bounds, never which are valid: those of the one are those of the other.
    """
    turn = -1 if graph.has_phases else _turn(indexed(graph))
    if turn < 0:
        return graph

    def marked() -> TrainingGraph:
        ops = (replace(op, phase="forward" if at <= turn else "backward") for at, op in enumerate(graph.ops))
        return replace(graph, ops=tuple(ops))

    return cached_on(graph, "with turn", marked)


def _turn(ix: Indexed) -> int:
    """The op after which most tensors wait to be read, if in the opposite order, or -1."""
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
    """Ranks, those of equals their mean."""
    _, where, counts = np.unique(values, return_inverse=True, return_counts=True)
    means: Floats = np.cumsum(counts) - (counts - 1) / 2
    return means[where]


def _correlation(a: Floats, b: Floats) -> float:
    """Of two rankings; 0 where one of them tells nothing apart."""
    a, b = a - a.mean(), b - b.mean()
    size = float(np.sqrt((a @ a) * (b @ b)))
    return float(a @ b) / size if size else 0.0
