"""Planners for single stages of a pipeline, based on the strategies that plan whole training steps."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass

from rematplan.ir import InfeasibleBudget, TrainingGraph
from rematplan.planner.auto.auto_strategy import Auto
from rematplan.planner.auto.block_starts import block_front
from rematplan.planner.auto.smallest_peak_search import find_smallest_peak_in_stages
from rematplan.planner.auto.time_shares import SHARES
from rematplan.planner.bounds.bound_search import BoundSearch
from rematplan.planner.core.effort import Effort
from rematplan.planner.core.plan import Plan
from rematplan.planner.core.strategy import Strategy


@dataclass(frozen=True)
class AutoStages:
    """Plans single stages of a pipeline with the strategy `Auto`; implements `StagePlanner`.

    ``time_limit``: the most seconds for each call of a method. ``seed``: of the random choices. ``gap``: a search
    ends when its plan's overhead is proven to exceed the optimum's by at most this.
    """

    time_limit: float = 2.0
    seed: int = Auto.seed
    gap: float = Auto.gap

    def starts(self, graph: TrainingGraph, effort: Effort) -> Sequence[Plan]:
        """Return plans of block strategies, from which searches for any budget begin."""
        return block_front(graph, self._part(effort))

    def within(
        self, graph: TrainingGraph, budget: int, starts: Sequence[Plan], effort: Effort
    ) -> Plan | None:
        """Return the cheapest plan found whose peak is within ``budget`` bytes, or None. ``starts``: known plans of the
        problem to start from.
        """
        search = Auto(seed=self.seed, gap=self.gap, reuse=False)
        return search.improved(graph, budget, starts, self._part(effort))

    def least(self, graph: TrainingGraph, starts: Sequence[Plan], effort: Effort) -> Plan:
        """Return the plan with the smallest peak that a search from the known plans ``starts`` finds. An exception that
        interrupts the search is raised again."""
        part = self._part(effort)
        plan = find_smallest_peak_in_stages(graph, part, starts)
        if part.interrupted is not None:
            raise part.interrupted
        return plan

    def floor(self, graph: TrainingGraph, budget: int, effort: Effort) -> float:
        """Return a proven lower bound of the overhead (a share of the time without recomputation) within
        ``budget`` bytes; infinite if no plan fits.
        """
        return BoundSearch(graph, budget).run(SHARES.proving(self._part(effort))).overhead

    def _part(self, effort: Effort) -> Effort:
        return effort.part(effort.of(self.time_limit))


@dataclass(frozen=True)
class StrategyStages:
    """Plans single stages of a pipeline with one strategy; implements `StagePlanner`. It proves no lower bounds."""

    strategy: Strategy

    def starts(self, _graph: TrainingGraph, _effort: Effort) -> Sequence[Plan]:
        """Return no plans: the strategy needs none to begin with."""
        return ()

    def within(
        self, graph: TrainingGraph, budget: int, starts: Sequence[Plan], _effort: Effort
    ) -> Plan | None:
        """Return the strategy's plan within ``budget`` bytes; None if it has none. ``starts``: plans to start from;
        ignored by strategies that do not search.
        """
        with suppress(InfeasibleBudget):
            return self.strategy.plan(graph, budget, starts=starts)
        return None

    def least(self, graph: TrainingGraph, starts: Sequence[Plan], _effort: Effort) -> Plan:
        """Return the strategy's plan within the inputs' bytes. If it refuses them, the budget is the smallest that its
        error states; `InfeasibleBudget` if it refuses this, too."""
        try:
            return self.strategy.plan(graph, graph.input_bytes, starts=starts)
        except InfeasibleBudget as error:
            return self.strategy.plan(graph, error.smallest, starts=starts)

    def floor(self, _graph: TrainingGraph, _budget: int, _effort: Effort) -> float:
        """Return 0, the lower bound of the overhead of any plan: the overhead of a plan without recomputation is 0."""
        return 0.0
