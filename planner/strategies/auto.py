"""Auto: the best plan of all strategies at the budget."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import ClassVar

from rematplan.ir import InfeasibleBudget, LatticeTooLarge, TrainingGraph
from rematplan.planner.plan import Plan
from rematplan.planner.strategies.approx_dp import ApproxDP
from rematplan.planner.strategies.chen_greedy import ChenGreedy
from rematplan.planner.strategies.chen_sqrt import ChenSqrt
from rematplan.planner.strategies.exact_dp import ExactDP
from rematplan.planner.strategies.store_all import StoreAll
from rematplan.planner.strategy import Progress, Strategy, pareto, silent

BLOCKS: tuple[Strategy, ...] = (
    ChenSqrt(),
    ChenGreedy(),
    ApproxDP(objective="time"),
    ApproxDP(objective="memory"),
    ExactDP(objective="time"),
    ExactDP(objective="memory"),
)


@dataclass(frozen=True)
class Auto(Strategy):
    """Never worse than any of its members; its plans carry the name of the member that found them.

    A member that a problem is too large for is passed over, and without a backward half so are the block
    strategies.
    """

    name: ClassVar[str] = "auto"
    summary: ClassVar[str] = "the best plan of all strategies at the budget"

    def plan(self, graph: TrainingGraph, budget: int, progress: Progress = silent) -> Plan:
        """See `Strategy.plan`."""
        found: list[Plan] = []
        smallest: list[int] = []

        def ask(member: Strategy, report: Progress) -> None:
            try:
                found.append(member.plan(graph, budget, report))
            except InfeasibleBudget as error:
                smallest.append(error.smallest)

        _each(graph, ask, progress)
        if not found:
            raise InfeasibleBudget(self.name, budget, min(smallest))
        return min(found, key=lambda p: (p.estimate.cost, p.estimate.peak))

    def curve(
        self, graph: TrainingGraph, budgets: Sequence[int], progress: Progress = silent
    ) -> tuple[Plan, ...]:
        """See `Strategy.curve`."""
        found: list[Plan] = []
        _each(graph, lambda member, report: found.extend(member.curve(graph, budgets, report)), progress)
        return pareto(found)


def _each(graph: TrainingGraph, ask: Callable[[Strategy, Progress], None], progress: Progress) -> None:
    members = (StoreAll(), *(BLOCKS if graph.has_phases else ()))
    for i, member in enumerate(members):

        def report(fraction: float, text: str, i: int = i, name: str = member.name) -> None:
            progress((i + fraction) / len(members), f"{name}: {text}")

        try:
            ask(member, report)
        except LatticeTooLarge:
            continue
