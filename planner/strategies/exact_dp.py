"""The strategy `exact_dp`: the best blocks over all lower sets (Kusumoto et al. 2019, section 4.1).

The recurrence is in `lower_set_dp`. One table takes O(#L²·ticks) time; #L can be exponential in the graph's
width.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import ClassVar

from rematplan.planner.blocks.forward_graph import ForwardGraph
from rematplan.planner.blocks.lower_sets import lower_sets
from rematplan.planner.core.strategy import Progress
from rematplan.planner.strategies.approx_dp import ApproxDP
from rematplan.planner.strategies.block_strategy import Chain
from rematplan.planner.strategies.dp_strategy import DPStrategy


@dataclass(frozen=True)
class ExactDP(DPStrategy):
    """Choose the best division of the forward into blocks by dynamic programming over all lower sets (Kusumoto et al.
    2019, section 4.1).

    For each budget that is tried, the division is optimal by the paper's formulas of peak and recomputation time, up to
    the rounding of times to ticks.

    Options: ``objective``, ``ticks``, ``budgets``: as for `DPStrategy`. ``max_lower_sets``: graphs with more lower sets
    are refused (`LatticeTooLarge`), because the search would take too long.
    """

    name: ClassVar[str] = "exact_dp"
    summary: ClassVar[str] = (
        "block partition by dynamic programming over all lower sets (Kusumoto et al. 2019)"
    )

    max_lower_sets: int = 3000

    def chains(self, view: ForwardGraph, progress: Progress) -> Iterable[Chain]:
        """Yield chains of lower sets found by the dynamic program over all lower sets, then chains found over the
        smaller family that `ApproxDP` uses.

        By the paper's formulas, the chains of the smaller family are never better than those over all lower sets. But
        plans are compared by their simulated peak and cost, and by these some chains of the smaller family are better.

        Raises:
            LatticeTooLarge: there are more than ``max_lower_sets`` lower sets.
        """
        yield from super().chains(view, lambda fraction, text: progress(fraction / 2, text))
        pruned = ApproxDP(self.objective, self.ticks, self.budgets)
        if len(self.lower_sets(view)) > len(pruned.lower_sets(view)):
            yield from pruned.chains(view, lambda fraction, text: progress((1 + fraction) / 2, text))

    def lower_sets(self, view: ForwardGraph) -> tuple[int, ...]:
        """Return all lower sets of the forward graph as bit masks of nodes, sorted by number of nodes.

        Raises:
            LatticeTooLarge: there are more than ``max_lower_sets`` lower sets.
        """
        return lower_sets(view, self.max_lower_sets, self.name)
