"""The positions of the tensors that a problem's ops read and write, in ``graph.tensors``, and the amounts of the same
problem at other sizes."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np

from rematplan.ir import TrainingGraph
from rematplan.planner.core.array_types import Floats, Ints
from rematplan.planner.family.amounts_by_position import Amounts


@dataclass(frozen=True, eq=False)
class TensorPositions:
    """Positions in a problem's ``graph.tensors``."""

    written: Ints
    """Positions of the tensors that ops write, in the order of writing."""
    inputs: Ints
    """Positions of the inputs."""
    moved: Ints
    """Positions of what each op, then each inverse, reads and writes."""
    counts: Ints
    """How many entries of ``moved`` each op, then each inverse, has."""
    ends: Ints
    """The index in ``moved`` after each op's or inverse's last entry."""
    ops: int
    """The number of ops, without inverses."""

    def traffic(self, sizes: Ints) -> Ints:
        """Return the bytes that each op, then each inverse, reads and writes. ``sizes``: by ``graph.tensors``."""
        moved = np.concatenate(([0], np.cumsum(sizes[self.moved])))
        found: Ints = moved[self.ends] - moved[self.ends - self.counts]
        return found

    def amounts(self, sizes: Ints, workspaces: Ints, costs: Floats, once: Ints) -> Amounts:
        """Return the amounts for ``sizes`` (by ``graph.tensors``); the other arguments are fields of `Amounts`."""
        return Amounts(
            sizes=sizes[self.written],
            workspaces=workspaces,
            costs=costs,
            fixed=int(sizes[self.inputs].sum()),
            base_cost=math.fsum(costs[: self.ops].tolist()),
            once=once,
        )


def with_amounts(graph: TrainingGraph, sizes: Sequence[int], amounts: Amounts) -> TrainingGraph:
    """Return the problem with the bytes ``sizes`` of ``graph.tensors``, and the workspaces and costs of ``amounts``.
    `TrainingGraph.fixed_split` becomes empty."""
    recipes = [
        replace(op, cost=cost, workspace=workspace)
        for op, cost, workspace in zip(
            graph.recipes, amounts.costs.tolist(), amounts.workspaces.tolist(), strict=True
        )
    ]
    return replace(
        graph,
        tensors=tuple(replace(t, bytes=b) for t, b in zip(graph.tensors, sizes, strict=True)),
        ops=tuple(recipes[: len(graph.ops)]),
        inverses=tuple(recipes[len(graph.ops) :]),
        fixed_split={},
    )


def tensor_positions(graph: TrainingGraph) -> TensorPositions:
    """Return the positions of the tensors that a problem's ops and inverses read and write, and of its inputs."""
    number = {t.name: i for i, t in enumerate(graph.tensors)}
    moved = [[number[t] for t in (*op.reads, *op.writes)] for op in graph.recipes]
    counts = np.array([len(row) for row in moved], dtype=np.int64)
    return TensorPositions(
        written=np.array([number[t] for t in graph.producer], dtype=np.int64),
        inputs=np.array([number[t] for t in graph.inputs], dtype=np.int64),
        moved=np.array([t for row in moved for t in row], dtype=np.int64),
        counts=counts,
        ends=np.cumsum(counts),
        ops=len(graph.ops),
    )
