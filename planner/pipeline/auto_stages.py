"""Planners for the stages of a pipeline that use strategies for whole problems."""

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
    """A `StagePlanner` that uses the strategy `Auto`.

    ``time_limit``: seconds for each call. ``deadline``: a time of the monotonic clock; after it, no plans and bounds
    are searched for, except the smallest peak, for a tenth of a second.
    """

    time_limit: float = 2.0
    deadline: float = math.inf

    @property
    def left(self) -> float:
        """The seconds until the deadline; negative after it."""
        return self.deadline - time.monotonic()

    def within(self, graph: TrainingGraph, budget: int, starts: Sequence[Plan]) -> Plan:
        """Return the cheapest plan found within ``budget`` bytes. After the deadline it is the cheapest of the starts
        and the plan without recomputation that fits.

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
        """Return the plan with the smallest peak that is found. ``starts``: known plans of the problem to start
        from."""
        return cheapest_near_smallest_peak(
            graph, min(self.time_limit, max(SHORTEST, self.left)), starts=starts
        )

    def floor(self, graph: TrainingGraph, budget: int) -> float:
        """Return a proven lower bound of the overhead of any plan within ``budget`` bytes; infinite if it is proven
        that no plan fits.

        After the deadline it is the bound that needs no search.
        """
        if self.left <= 0:
            return CutBounds(graph, budget).best.overhead
        return lower_bound(graph, budget, min(self.time_limit, self.left)).overhead


@dataclass(frozen=True)
class StrategyStages:
    """A `StagePlanner` that uses any one strategy. It proves no lower bounds."""

    strategy: Strategy

    def within(self, graph: TrainingGraph, budget: int, starts: Sequence[Plan]) -> Plan:
        """Return the strategy's plan within ``budget`` bytes. ``starts``: plans to start from; ignored by strategies
        that do not search.

        Raises:
            InfeasibleBudget: the strategy finds no plan that fits.
        """
        return self.strategy.plan(graph, budget, starts=starts)

    def least(self, graph: TrainingGraph, starts: Sequence[Plan]) -> Plan:
        """Return the strategy's plan at the smallest budget that the strategy reports to be able to meet."""
        try:
            return self.strategy.plan(graph, graph.input_bytes, starts=starts)
        except InfeasibleBudget as error:
            return self.strategy.plan(graph, error.smallest, starts=starts)

    def floor(self, _graph: TrainingGraph, _budget: int) -> float:
        """Return 0: without recomputation the overhead is 0, and no plan has less."""
        return 0.0
