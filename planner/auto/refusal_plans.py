"""The plans that the error `InfeasibleBudget` names if no plan fits a budget: the one with the smallest peak found, and
the one with the smallest peak among those with little overhead."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial

from rematplan.ir import TrainingGraph
from rematplan.planner.annealing.cheap_plan import CHEAP_SHARE, cheap_plan
from rematplan.planner.annealing.rungs import rungs_above
from rematplan.planner.auto.block_starts import leanest_plans
from rematplan.planner.auto.smallest_peak_search import is_small, search_smallest_peak
from rematplan.planner.auto.time_shares import SHARES, SessionOptions
from rematplan.planner.core.effort import Effort
from rematplan.planner.core.plan import Plan
from rematplan.planner.core.strategy import Progress

REFUSED = 1.05
"""The smallest peak, as a multiple of the smallest found, at which a refusal searches for a further plan."""


@dataclass
class RefusalSearch:
    """The search that follows if no plan fits a budget. It finds the plans that the error `InfeasibleBudget` names.

    ``options``: the options of the strategy ``auto``. ``problem``: the problem as stated. ``graph``: the same with
    inferred phases. ``starts``: the plans that the caller of the strategy passed. ``known``: all plans known so far.
    ``take``: adds plans to ``known``. ``progress``: called with the fraction done (0 to 1) and a short text.
    ``effort``: that of the whole search.
    """

    options: SessionOptions
    problem: TrainingGraph
    graph: TrainingGraph
    starts: Sequence[Plan]
    known: list[Plan]
    take: Callable[[Sequence[Plan]], None]
    progress: Progress
    effort: Effort
    small: bool = field(init=False)
    """Whether searches for the smallest peak count moves instead of seconds."""

    def __post_init__(self) -> None:
        self.small = is_small(self.problem)

    @property
    def effort_of_min(self) -> Effort:
        """What a search for the smallest peak may spend: as much as for the budget ``min``, but at most what is left. A
        small problem gets this even if less is left."""
        most = SHARES.smallest_peak * self.effort.total
        return self.effort.like(SHARES.smallest_peak) if self.small else self.effort.part(most)

    def lower(self, proven: bool) -> None:
        """Search for the smallest peak, after no plan was found that fits a budget. The plans found are added to the
        known ones.

        The search takes the time that is left. If it is proven that no plan fits, it may instead take half of the time
        limit, from now. It then begins with block plans, and lowers their peak in rounds: the first takes a few
        seconds, each further one twice as long. They end when a round gains little. A small problem is searched by the
        stages of `search_smallest_peak` instead, as for the budget ``min``.
        """
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
        """Search for the smallest peak, and add the plan found to the known ones. Return the exception by which Ctrl-C
        or the progress callback ended the search, or None.

        A small problem is searched from ``starts`` only, because then the search is the one for the budget ``min`` and
        finds the same peak.
        """
        found, interrupted = search_smallest_peak(
            self.problem,
            effort,
            self.starts if self.small else self.known,
            partial(_looking, self.progress),
            enough=enough,
            ended=ended,
            keep_order=self.options.keep_order,
            seed=self.options.seed,
        )
        self.take((found,))
        return interrupted

    def cheap(self) -> Plan:
        """Return the plan with the smallest peak found among plans with little overhead. The error `InfeasibleBudget`
        names its peak."""
        effort = self.effort.like(CHEAP_SHARE, most=SHARES.cheap_seconds)
        order, seed = self.options.keep_order, self.options.seed
        return cheap_plan(self.graph, self.known, effort, seed=seed, keep_order=order)

    def above(self) -> list[Plan]:
        """Return plans at peaks up to 1.2 times the smallest found. The error states what they cost."""
        effort = self.effort.like(CHEAP_SHARE, most=SHARES.rungs_seconds)
        order, seed = self.options.keep_order, self.options.seed
        return rungs_above(self.graph, self.known, effort, least=REFUSED, seed=seed, keep_order=order)


def _looking(progress: Progress, fraction: float, _text: str) -> None:
    progress(fraction, "nothing fits; lowering the peak")
