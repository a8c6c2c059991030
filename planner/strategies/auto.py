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

ALWAYS: tuple[tuple[Strategy, ...], ...] = ((StoreAll(),),)
BLOCKS: tuple[tuple[Strategy, ...], ...] = (
    (ChenSqrt(),),
    (ChenGreedy(),),
    (ExactDP(objective="time"), ApproxDP(objective="time")),
    (ExactDP(objective="memory"), ApproxDP(objective="memory")),
)
"""The members, in rows: of each row the first counts that the problem is not too large for."""


@dataclass(frozen=True)
class Auto(Strategy):
    """Never worse than any of its members; its plans carry the name of the member that found them.

    `exact_dp` finds all that `approx_dp` finds, which takes its place where the lattice is too large. Without
    a backward half the block strategies are passed over.
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
    rows = (*ALWAYS, *(BLOCKS if graph.has_phases else ()))
    for i, row in enumerate(rows):
        for member in row:

            def report(fraction: float, text: str, i: int = i, name: str = member.name) -> None:
                progress((i + fraction) / len(rows), f"{name}: {text}")

            try:
                ask(member, report)
            except LatticeTooLarge:
                continue
            break
