"""Where a problem's ops read and write, by positions of its tensors."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from rematplan.ir import TrainingGraph
from rematplan.planner.family.amounts_by_position import Ints


@dataclass(frozen=True, eq=False)
class Places:
    """Positions among a problem's tensors: of those that ops write, of the inputs, and of what each op and inverse
    reads and writes (``counts`` of them, up to ``ends``)."""

    written: Ints
    inputs: Ints
    moved: Ints
    counts: Ints
    ends: Ints


def places_of(graph: TrainingGraph) -> Places:
    """Return the places of a problem."""
    number = {t.name: i for i, t in enumerate(graph.tensors)}
    moved = [[number[t] for t in (*op.reads, *op.writes)] for op in (*graph.ops, *graph.inverses)]
    counts = np.array([len(row) for row in moved], dtype=np.int64)
    return Places(
        written=np.array([number[t] for t in graph.producer], dtype=np.int64),
        inputs=np.array([number[t] for t in graph.inputs], dtype=np.int64),
        moved=np.array([t for row in moved for t in row], dtype=np.int64),
        counts=counts,
        ends=np.cumsum(counts),
    )
