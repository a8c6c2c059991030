"""Planners for single stages of a pipeline, based on the strategies that plan whole training steps."""

from __future__ import annotations

import math
import time
from collections.abc import Sequence
from dataclasses import dataclass

from rematplan.ir import InfeasibleBudget, TrainingGraph
from rematplan.planner.auto.auto_strategy import Auto
from rematplan.planner.auto.min_budget_plan import cheapest_near_smallest_peak
from rematplan.planner.bounds.bound_search import lower_bound
from rematplan.planner.bounds.cut_bounds import CutBounds
from rematplan.planner.core.plan import Plan
from rematplan.planner.core.strategy import Strategy
from rematplan.planner.strategies.store_all import no_recompute

SHORTEST = 0.1
"""Seconds that a search for the smallest peak may still take after the deadline."""


@dataclass(frozen=True)
class AutoStages:
    """Plans single stages of a pipeline with the strategy `Auto`; implements `StagePlanner`.

    ``time_limit``: seconds for each call of a method. ``deadline``: a time of the monotonic clock. After it, `within`
    and `floor` do not search, and `least` searches for a tenth of a second.
    """

    time_limit: float = 2.0
    deadline: float = math.inf

    @property
    def left(self) -> float:
        """The seconds until ``deadline``; negative after it."""
        return self.deadline - time.monotonic()

    def within(self, graph: TrainingGraph, budget: int, starts: Sequence[Plan]) -> Plan:
        """Return the cheapest plan found whose peak is within ``budget`` bytes. ``starts``: known plans of the problem
        to start from.

        After the deadline there is no search: the result is the cheapest plan that fits among ``starts`` and the plan
        without recomputation.

        Raises:
            InfeasibleBudget: no plan is found that fits.
        """
        if self.left <= 0:
            known = (*starts, no_recompute(graph))
            fitting = [p for p in known if p.estimate.peak <= budget]
            if not fitting:
                raise InfeasibleBudget("auto", budget, min(p.estimate.peak for p in known), "searched")
            return min(fitting, key=lambda p: p.estimate.cost)
        return Auto(time_limit=min(self.time_limit, self.left), reuse=False).plan(
            graph, budget, starts=starts
        )

    def least(self, graph: TrainingGraph, starts: Sequence[Plan]) -> Plan:
        """Return the cheapest plan found among those with the smallest peak found. ``starts``: known plans of the
        problem to start from."""
        return cheapest_near_smallest_peak(
            graph, min(self.time_limit, max(SHORTEST, self.left)), starts=starts
        )

    def floor(self, graph: TrainingGraph, budget: int) -> float:
        """Return a proven lower bound of the overhead (a share of the time without recomputation) of any plan within
        ``budget`` bytes; infinite if it is proven that no plan fits.

        After the deadline, only the lower bound that needs no search (`CutBounds`) is computed.
        """
        if self.left <= 0:
            return CutBounds(graph, budget).best.overhead
        return lower_bound(graph, budget, min(self.time_limit, self.left)).overhead


@dataclass(frozen=True)
class StrategyStages:
    """Plans single stages of a pipeline with one strategy; implements `StagePlanner`. It proves no lower bounds."""

    strategy: Strategy

    def within(self, graph: TrainingGraph, budget: int, starts: Sequence[Plan]) -> Plan:
        """Return the strategy's plan within ``budget`` bytes. ``starts``: plans to start from; ignored by strategies
        that do not search.

        Raises:
            InfeasibleBudget: the strategy finds no plan that fits.
        """
        return self.strategy.plan(graph, budget, starts=starts)

    def least(self, graph: TrainingGraph, starts: Sequence[Plan]) -> Plan:
        """Return the strategy's plan within the smallest budget that the strategy can meet. This budget is the smallest
        peak that the strategy reports when it refuses a budget that is too small."""
        try:
            return self.strategy.plan(graph, graph.input_bytes, starts=starts)
        except InfeasibleBudget as error:
            return self.strategy.plan(graph, error.smallest, starts=starts)

    def floor(self, _graph: TrainingGraph, _budget: int) -> float:
        """Return 0, the lower bound of the overhead of any plan: the overhead of a plan without recomputation is 0."""
        return 0.0
