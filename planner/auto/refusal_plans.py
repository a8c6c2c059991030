"""The plans that a refusal names: the one with the smallest peak found, and the leanest one that costs little."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial

from rematplan.ir import TrainingGraph
from rematplan.planner.annealing.cheap_plan import CHEAP_SHARE, cheap_plan
from rematplan.planner.annealing.search_budget import SearchBudget
from rematplan.planner.auto.auto_options import SHARES, SessionOptions
from rematplan.planner.auto.smallest_peak_search import find_smallest_peak
from rematplan.planner.core.plan import Plan
from rematplan.planner.core.strategy import Progress


@dataclass
class RefusalSearch:
    """The search for the plans of a refusal.

    ``problem``, ``graph``: the problem, as stated and with inferred phases. ``known``: all plans known so far, to which
    ``take`` adds. ``progress``: called with the fraction done and a short text.
    """

    options: SessionOptions
    problem: TrainingGraph
    graph: TrainingGraph
    known: list[Plan]
    take: Callable[[Sequence[Plan]], None]
    progress: Progress

    def lower(self, left: float, proven: bool) -> None:
        """Lower the peak, for a refusal, as for the budget ``min``.

        The search takes the time that is left. If the budget is proven to be too small, it takes a few seconds, or
        longer as long as much is gained, but no longer than for ``min``.

        Args:
            left: the seconds that are left.
            proven: whether it is proven that no plan fits the budget.
        """
        if not proven:
            self._lower_for(left)
            return
        until = time.monotonic() + SHARES.smallest_peak * self.options.time_limit
        seconds, before = SHARES.round_seconds, math.inf
        while (left := until - time.monotonic()) > 0:
            interrupted = self._lower_for(min(seconds, left))
            smallest = min(plan.peak for plan in self.known)
            if interrupted or smallest > (1 - SHARES.round_gain) * before:
                return
            before, seconds = smallest, 2 * seconds

    def _lower_for(self, seconds: float) -> bool:
        """Lower the peak for so many seconds. Return whether Ctrl-C ended the search."""
        effort, report = SearchBudget(seconds), partial(_looking, self.progress)
        order, seed = self.options.keep_order, self.options.seed
        found = find_smallest_peak(self.problem, effort, self.known, report, keep_order=order, seed=seed)
        self.take((found,))
        return effort.interrupted

    def cheap(self) -> Plan:
        """Return the leanest plan found that costs little, for a refusal."""
        effort = SearchBudget(min(SHARES.cheap_seconds, CHEAP_SHARE * self.options.time_limit))
        order, seed = self.options.keep_order, self.options.seed
        return cheap_plan(self.graph, self.known, effort, seed=seed, keep_order=order)


def _looking(progress: Progress, fraction: float, _text: str) -> None:
    progress(fraction, "nothing fits; lowering the peak")
