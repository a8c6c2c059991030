"""Approximate dynamic program: the best block partition over the pruned family of lower sets.

Kusumoto et al., NeurIPS 2019, arXiv:1905.11722, section 4.3; the recurrence is in `lower_set_dp`. The family
contains each node with its ancestors, ∅ and V: at most #V + 2 lower sets for any graph, so each table takes
O(#V²·ticks).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from rematplan.planner.blocks.forward_graph import ForwardGraph
from rematplan.planner.blocks.lower_sets import pruned_lower_sets
from rematplan.planner.strategies.dp_strategy import DPStrategy


@dataclass(frozen=True)
class ApproxDP(DPStrategy):
    """Choose the best partition of the forward into blocks by dynamic programming over the pruned family of lower
    sets: each node with its ancestors (Kusumoto et al. 2019, section 4.3).

    By the paper's formula of the peak, its plans are never better than those of `ExactDP`.

    Options: ``objective``, ``ticks``, ``budgets``: as for `DPStrategy`. ``max_lower_sets``: of a larger family only
    about this many lower sets are used, spread evenly over the bytes.
    """

    name: ClassVar[str] = "approx_dp"
    summary: ClassVar[str] = (
        "block partition by dynamic programming over each op's ancestors (Kusumoto et al. 2019)"
    )

    def lower_sets(self, view: ForwardGraph) -> tuple[int, ...]:
        """Return the lower sets to use as bit masks: each node with its ancestors, ∅, and the set of all nodes, by
        number of nodes."""
        return pruned_lower_sets(view, self.max_lower_sets)
