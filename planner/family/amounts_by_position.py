"""The sizes, workspaces and costs of a problem as arrays, by position instead of by name."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from rematplan.ir import TrainingGraph
from rematplan.planner.core.array_types import Floats, Ints


@dataclass(frozen=True, eq=False)
class Amounts:
    """The sizes, workspaces and costs of a problem: what distinguishes problems of one structure, apart from
    names.
    """

    sizes: Ints
    """Bytes of each tensor that an op writes, in the order of writing."""
    workspaces: Ints
    """Bytes of each op, then of each inverse."""
    costs: Floats
    """Of each op, then of each inverse."""
    fixed: int
    """Bytes of all inputs together."""
    base_cost: float
    """The cost of running every op once."""
    once: Ints
    """Positions of the ops that may run only once."""

    @property
    def total(self) -> int:
        """The bytes of all tensors, inputs included."""
        return self.fixed + int(self.sizes.sum())

    def equals(self, other: Amounts) -> bool:
        """Return whether all fields are equal to those of ``other``."""
        return (
            (self.fixed, self.base_cost) == (other.fixed, other.base_cost)
            and np.array_equal(self.sizes, other.sizes)
            and np.array_equal(self.workspaces, other.workspaces)
            and np.array_equal(self.costs, other.costs)
            and np.array_equal(self.once, other.once)
        )


def amounts_of(graph: TrainingGraph) -> Amounts:
    """Return the sizes, workspaces and costs of a problem, by the positions of its tensors, ops and inverses."""
    size, recipes = graph.size, graph.recipes
    once = set(graph.never_rerun)
    return Amounts(
        sizes=np.array([size[t] for t in graph.producer], dtype=np.int64),
        workspaces=np.array([op.workspace for op in recipes], dtype=np.int64),
        costs=np.array([op.cost for op in recipes], dtype=np.float64),
        fixed=graph.input_bytes,
        base_cost=graph.base_cost,
        once=np.array([i for i, op in enumerate(graph.ops) if op.name in once], dtype=np.int64),
    )
