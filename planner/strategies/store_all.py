"""The strategy `store_all`: execute every op once, in the problem's order. It takes the least time, and the memory of
training without recomputation."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import ClassVar

from rematplan.ir import TrainingGraph
from rematplan.planner.core.plan import Plan, plan_from_runs
from rematplan.planner.core.strategy import FamilyStrategy, Progress, silent


@dataclass(frozen=True)
class StoreAll(FamilyStrategy):
    """Execute every op once, in the problem's order. Each tensor is freed after its last use. This is training without
    recomputation."""

    name: ClassVar[str] = "store_all"
    summary: ClassVar[str] = "run every op once and keep what the backward reads"

    def family(self, graph: TrainingGraph, progress: Progress = silent) -> Iterable[Plan]:
        """Yield the only plan: it executes every op once."""
        del progress
        yield plan_from_runs(graph, [op.name for op in graph.ops], self.name)


def no_recompute(graph: TrainingGraph) -> Plan:
    """Return the plan that executes every op of a problem once, in the problem's order. Its peak is what a budget in
    percent refers to."""
    return next(iter(StoreAll().family(graph)))
