"""The plans that `InfeasibleBudget` names: with the smallest peak found, and with the smallest at little overhead."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial

from rematplan.ir import TrainingGraph
from rematplan.planner.annealing.cheap_plan import CHEAP_SHARE, cheap_plan
from rematplan.planner.auto.block_starts import leanest_plans
from rematplan.planner.auto.rungs import rungs_above
from rematplan.planner.auto.session_options import SessionOptions
from rematplan.planner.auto.smallest_peak_search import is_small, search_smallest_peak
from rematplan.planner.auto.time_shares import SHARES
from rematplan.planner.core.effort import Effort
from rematplan.planner.core.plan import Plan
from rematplan.planner.core.strategy import Progress

REFUSED = 1.05
"""The smallest peak, as a multiple of the smallest found, at which a refusal searches for a further plan."""


@dataclass
class RefusalSearch:
    """The search that follows if no plan fits a budget, for the plans that `InfeasibleBudget` names."""

    options: SessionOptions
    problem: TrainingGraph
    """As stated."""
    graph: TrainingGraph
    """With inferred phases."""
    starts: Sequence[Plan]
    """What the caller of the strategy passed."""
    known: list[Plan]
    """All plans known so far."""
    take: Callable[[Sequence[Plan]], None]
    """Adds plans to ``known``."""
    progress: Progress
    effort: Effort
    """Of the whole search."""
    small: bool = field(init=False)
    """Whether searches for the smallest peak count moves instead of seconds."""

    def __post_init__(self) -> None:
        self.small = is_small(self.problem)

    @property
    def effort_of_min(self) -> Effort:
        """What a search for the smallest peak may spend: as for the budget ``min``, limited to what is left
        unless the problem is small.
        """
        most = SHARES.smallest_peak * self.effort.total
        return self.effort.like(SHARES.smallest_peak) if self.small else self.effort.part(most)

    def lower(self, proven: bool) -> None:
        """Search for the smallest peak after no plan was found that fits, and add the plans found to the known ones.
        ``proven``: whether it is proven that none fits. If not, the effort left is spent. If so, small problems spend
        as much as for ``min``. Large ones spend up to half of the time limit, in longer and longer rounds until one
        gains little."""
        if self.small or not proven:
            self.lower_for(self.effort_of_min if proven else self.effort.part(self.effort.left))
            return
        effort = self.effort.like(SHARES.smallest_peak)
        self.take(leanest_plans(self.problem, effort.part(effort.of(SHARES.refused_blocks))))
        amount, before = effort.of(SHARES.round_seconds), min((p.peak for p in self.known), default=math.inf)
        while not effort.over:
            interrupted = self.lower_for(effort.part(amount))
            smallest = min(plan.peak for plan in self.known)
            if interrupted or smallest > (1 - SHARES.round_gain) * before:
                return
            before, amount = smallest, 2 * amount

    def lower_for(
        self, effort: Effort, enough: int = 0, ended: Callable[[], bool] = lambda: False
    ) -> BaseException | None:
        """Search for the smallest peak and take the plan. Return the interrupt that ended the search, or None.
        ``enough``: bytes at which the search ends. ``ended``: returns whether it must end early."""
        found, interrupted = search_smallest_peak(
            self.problem,
            effort,
            # Then it is the search of the budget ``min``, with the same peak.
            self.starts if self.small else self.known,
            partial(_looking, self.progress),
            enough=enough,
            ended=ended,
            rules=self.options.rules,
        )
        self.take((found,))
        return interrupted

    def cheap(self) -> Plan:
        """Return the plan with the smallest peak found among plans with little overhead. The error `InfeasibleBudget`
        names its peak."""
        effort = self._brief(SHARES.cheap_seconds)
        return cheap_plan(self.graph, self.known, effort, rules=self.options.rules)

    def above(self) -> list[Plan]:
        """Return plans at peaks up to 1.2 times the smallest found. The error states what they cost."""
        effort = self._brief(SHARES.rungs_seconds)
        return rungs_above(self.graph, self.known, effort, least=REFUSED, rules=self.options.rules)

    def _brief(self, seconds: float) -> Effort:
        most = min(seconds, SHARES.refused_per_op * len(self.graph.ops))
        return self.effort.like(CHEAP_SHARE, most=most)


def _looking(progress: Progress, fraction: float, _text: str) -> None:
    progress(fraction, "nothing fits; lowering the peak")
