"""Known plans of the stages of one rank of a pipeline, and the best choice of one plan for each stage."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import product
from typing import TypeAlias

from rematplan.ir import TrainingGraph
from rematplan.planner.core.plan import Plan
from rematplan.planner.core.simulator import simulate
from rematplan.planner.pipeline.actions import RankActions
from rematplan.planner.pipeline.rank_memory import rank_peak
from rematplan.planner.pipeline.stage_plan import StagePlan
from rematplan.planner.pipeline.stage_problem import StageProblem

PRICES = 12
"""How often the price of a kept byte is halved and doubled for choices from which a local search begins."""
COMBINATIONS = 1000
"""All combinations of one plan for each stage are tried if there are at most this many."""


@dataclass(frozen=True)
class StageCandidate:
    """A plan of a stage, and the memory and times of the stage under it."""

    plan: Plan
    figures: StagePlan


Chosen: TypeAlias = tuple[StageCandidate, ...]
"""For each stage, one of its candidates."""


class RankCandidates:
    """The plans that a search has found for each stage of one rank (``found``). ``kept``: for each stage, the most
    bytes that a plan may keep from forward to backward; empty: no limit."""

    def __init__(
        self, stages: Sequence[StageProblem], actions: RankActions, kept: Sequence[int] = ()
    ) -> None:
        self.stages, self.actions = tuple(stages), actions
        self.kept = tuple(kept) or (math.inf,) * len(self.stages)
        self.found: list[list[StageCandidate]] = [[] for _ in self.stages]
        self.begun: set[int] = set()
        """The stages whose candidates include the plans from which searches begin."""

    def take(self, at: int, plan: Plan) -> StagePlan:
        """Add a plan to the candidates of stage ``at``, and return the memory and times that it has in the original
        problem.

        The plan is not added if it keeps more bytes than the stage's ``kept`` or a candidate has equal figures.
        """
        stage = self.stages[at]
        own = replace(plan, estimate=simulate(stage.graph, plan.schedule))
        figures, found = stage.measured(own), self.found[at]
        if figures.held.kept <= self.kept[at] and all(figures != c.figures for c in found):
            found.append(StageCandidate(own, figures))
        return figures

    def starts(self, at: int, graph: TrainingGraph) -> list[Plan]:
        """Return the plans of stage number ``at`` of the rank as plans of ``graph``, a variant of its problem."""
        return [replace(c.plan, estimate=simulate(graph, c.plan.schedule)) for c in self.found[at]]

    def within(self, budget: int) -> Chosen | None:
        """Return the cheapest choice with which the rank needs at most ``budget`` bytes; None if there is none."""
        chosen = self.choose(lambda c: (max(0, self.peak(c) - budget), extra(c), self.peak(c)))
        if self.peak(chosen) > budget:
            chosen = self.leanest()  # the other choice may be a local optimum
        return chosen if self.peak(chosen) <= budget else None

    def leanest(self) -> Chosen:
        """Return the choice with which the rank's peak is the smallest."""
        return self.choose(lambda chosen: (self.peak(chosen), extra(chosen)))

    def choose(self, key: Callable[[Chosen], tuple[float, ...]]) -> Chosen:
        """Return the choice of one candidate per stage with the least ``key``; with more than `COMBINATIONS`
        choices, a local optimum.
        """
        if math.prod(map(len, self.found)) <= COMBINATIONS:
            return min(product(*self.found), key=key)
        chosen = min(self._by_price(), key=key)
        better = True
        while better:
            before = key(chosen)
            for at, found in enumerate(self.found):
                chosen = min(((*chosen[:at], c, *chosen[at + 1 :]) for c in found), key=key)
            better = key(chosen) < before
        return chosen

    def _by_price(self) -> Iterator[Chosen]:
        """Yield the choice that keeps the fewest bytes, and for several prices the one whose time plus price × kept
        bytes is least."""
        every = [c for found in self.found for c in found]
        time = max(c.figures.times.extra for c in every) or 1.0
        scale = time / max(1, *(c.figures.held.kept for c in every))
        for price in (math.inf, *(scale * 2.0**k for k in range(-PRICES, PRICES + 1))):

            def cost(c: StageCandidate, price: float = price) -> float:
                own = 0.0 if price == math.inf else c.figures.times.extra / price
                return own + c.figures.held.kept

            yield tuple(min(found, key=cost) for found in self.found)

    def peak(self, chosen: Chosen) -> int:
        """Return the most bytes that the rank holds at any moment of a step if its stages follow these plans."""
        return rank_peak(self.actions, [c.figures for c in chosen])


def extra(chosen: Chosen) -> float:
    """Return the microseconds of recomputation for one micro-batch, summed over the stages."""
    return math.fsum(c.figures.times.extra for c in chosen)
