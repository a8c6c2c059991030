"""Store all: run every op once, in the base order. It has the least time, and the memory of a step without a plan."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import ClassVar

from rematplan.ir import TrainingGraph
from rematplan.planner.core.plan import Plan, plan_from_runs
from rematplan.planner.core.strategy import FamilyStrategy, Progress, silent


@dataclass(frozen=True)
class StoreAll(FamilyStrategy):
    """Run every op once, in the problem's order; each tensor is freed after its last use. This is training without
    recomputation."""

    name: ClassVar[str] = "store_all"
    summary: ClassVar[str] = "run every op once and keep what the backward reads"

    def family(self, graph: TrainingGraph, progress: Progress = silent) -> Iterable[Plan]:
        """Yield the only plan, which runs every op once."""
        del progress
        yield plan_from_runs(graph, [op.name for op in graph.ops], self.name)


def no_recompute(graph: TrainingGraph) -> Plan:
    """Return the plan that runs every op once. A budget given as a percentage is a percentage of this plan's peak."""
    return next(iter(StoreAll().family(graph)))
