"""Strategies that make many run sequences of a step's two halves, whatever the budget, and keep the best."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from rematplan.ir import TrainingGraph, UsageError
from rematplan.planner.memo import remember
from rematplan.planner.plan import Plan, plan_from_runs
from rematplan.planner.run_price import price_runs
from rematplan.planner.strategy import Enough, FamilyStrategy, Progress, pareto, silent
from rematplan.planner.traffic import Ints
from rematplan.planner.turn import with_turn


class Candidate(NamedTuple):
    """A run sequence by base positions, and the blocks that it came from, if it is of one partition."""

    runs: Ints
    blocks: tuple[tuple[str, ...], ...] | None = None


class _Priced(NamedTuple):
    cost: float
    peak: int
    candidate: Candidate


@dataclass(frozen=True)
class CandidateStrategy(FamilyStrategy):
    """What was worked out for a problem is remembered as long as the problem lives, so that many budgets cost one
    search. The base order itself is in every family."""

    def candidates(self, graph: TrainingGraph, progress: Progress) -> Iterable[Candidate]:
        """Sequences for a problem with phases; repeats do no harm."""
        raise NotImplementedError

    def family(self, graph: TrainingGraph, progress: Progress = silent) -> Iterable[Plan]:
        """The candidates that no other beats in both peak and cost.

        Raises:
            UsageError: the problem has no backward half, marked or plain to see (`turn`), so that blocks mean nothing.
        """
        graph = with_turn(graph)
        if not graph.has_phases:
            raise UsageError(
                f"{self.name}: no op of problem {graph.name!r} is marked backward, and blocks are chosen "
                f"in the forward half; try --strategy auto"
            )
        # Where the halves are interleaved, no candidate gives the base order back.
        yield plan_from_runs(graph, [op.name for op in graph.ops], self.name)
        front: list[_Priced] = []
        ended: Enough | None = None
        try:
            for candidate in self.candidates(graph, progress):
                peak, cost = price_runs(graph, candidate.runs)
                front = _front([*front, _Priced(cost, peak, candidate)])
        except Enough as enough:
            ended = enough
        for at, (_, _, (runs, blocks)) in enumerate(
            reversed(front)
        ):  # the leanest first: nothing else may fit
            if at:
                progress(1.0, f"plan {at} of {len(front)}")
            yield plan_from_runs(graph, [graph.ops[o].name for o in runs], self.name, blocks=blocks)
        if ended:
            raise ended

    def curve(
        self, graph: TrainingGraph, budgets: Sequence[int], progress: Progress = silent
    ) -> tuple[Plan, ...]:
        """See `FamilyStrategy.curve`; searched once a graph, unless it is told that it is enough."""
        del budgets
        found: list[Plan] = []

        def search() -> tuple[Plan, ...]:
            for plan in self.family(graph, progress):
                found.append(plan)
            return pareto(found)

        try:
            return remember(graph, (self.name, self), search)
        except Enough:
            return pareto(found)


def _front(priced: Sequence[_Priced]) -> list[_Priced]:
    """Those that no other beats, by rising cost; the first of equals."""
    front: list[_Priced] = []
    least = math.inf
    for row in sorted(priced, key=lambda row: row[:2]):
        if row.peak < least:
            least = row.peak
            front.append(row)
    return front
