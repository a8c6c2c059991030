"""The `auto` strategy, its smallest peak and its bounds, as what plans the stages of a pipeline."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from rematplan.ir import TrainingGraph
from rematplan.planner.auto.min_peak import smallest_peak
from rematplan.planner.auto.strategy import Auto
from rematplan.planner.bounds.search import lower_bound
from rematplan.planner.core.plan import Plan


@dataclass(frozen=True)
class AutoStages:
    """``time_limit``: seconds that each question may take."""

    time_limit: float = 2.0

    def within(self, graph: TrainingGraph, budget: int, starts: Sequence[Plan]) -> Plan:
        """See `StagePlanner.within`."""
        return Auto(time_limit=self.time_limit, reuse=False).plan(graph, budget, starts=starts)

    def least(self, graph: TrainingGraph, starts: Sequence[Plan]) -> Plan:
        """See `StagePlanner.least`."""
        return smallest_peak(graph, self.time_limit, starts=starts)

    def floor(self, graph: TrainingGraph, budget: int) -> float:
        """See `StagePlanner.floor`."""
        return lower_bound(graph, budget, self.time_limit).overhead
