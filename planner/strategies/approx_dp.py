"""The strategy `approx_dp`: the best blocks over each node with its ancestors, ∅ and all nodes (Kusumoto et
al. 2019, section 4.3).

The recurrence is in `lower_set_dp`. At most #V + 2 sets: one table takes O(#V²·ticks) time.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from rematplan.planner.blocks.forward_graph import ForwardGraph
from rematplan.planner.blocks.lower_sets import pruned_lower_sets
from rematplan.planner.strategies.dp_strategy import DPStrategy


@dataclass(frozen=True)
class ApproxDP(DPStrategy):
    """Choose the best division of the forward into blocks by dynamic programming over the pruned family of lower sets:
    each node with its ancestors (Kusumoto et al. 2019, section 4.3).

    By the paper's formulas, plans of this strategy are never better than those of `ExactDP`, which uses all lower sets.

    Options: ``objective``, ``ticks``, ``budgets``: as for `DPStrategy`. ``max_lower_sets``: if the family is larger,
    only about this many of its lower sets are used, chosen so that their bytes are evenly spaced.
    """

    name: ClassVar[str] = "approx_dp"
    summary: ClassVar[str] = (
        "block partition by dynamic programming over each op's ancestors (Kusumoto et al. 2019)"
    )

    def lower_sets(self, view: ForwardGraph) -> tuple[int, ...]:
        """Return the lower sets for the dynamic program as bit masks of nodes, sorted by number of nodes: each node
        with its ancestors, the empty set, and the set of all nodes. If there are more than ``max_lower_sets``, about
        this many of them."""
        return pruned_lower_sets(view, self.max_lower_sets)
