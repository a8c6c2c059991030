"""Plans for a rank's stages with several micro-batches in flight, within one budget.

The bytes K that a plan keeps between forward and backward are held once for each micro-batch in flight, the
transients only once. If each stage's K is at most κ, then the other micro-batches leave each action a known part of
the budget, and `StageProblem.bounded` turns that into an ordinary planning problem. So the search is for κ: first on
a grid between the smallest K and that of a plan without recomputation, then around the best value. All plans ever
found are candidates. Each is measured, and the result is the cheapest combination for which the replay of the rank's
actions stays within the budget.

The lower bound: the K of every plan is in one of the intervals between the values of κ. In (κ₁, κ₂] a stage holds at
most κ₂ and the others at least κ₁. A lower bound of this relaxed problem, the least over all intervals, holds for all
plans.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from copy import copy
from dataclasses import dataclass, replace
from itertools import pairwise, product
from typing import Protocol, TypeAlias

from rematplan.ir import InfeasibleBudget, TrainingGraph
from rematplan.planner.bounds.cut_bounds import min_peak_bound
from rematplan.planner.core.plan import Plan
from rematplan.planner.core.simulator import simulate
from rematplan.planner.pipeline.actions import RankActions, StagePlan
from rematplan.planner.pipeline.rank_budget_shares import Bounds, RankRoom
from rematplan.planner.pipeline.rank_memory import rank_peak
from rematplan.planner.pipeline.stage_problem import StageProblem
from rematplan.planner.strategies.store_all import no_recompute

CLOSED = 1e-6
"""A lower bound counts as lower than a plan if the difference is more than this, in microseconds."""


@dataclass(frozen=True)
class RankSearchLimits:
    """The constants of the search for the plans of a rank's stages, chosen by trial without a record of single
    measurements. κ: the limit of the bytes that a stage keeps for a micro-batch between forward and backward."""

    grid: int = 5
    """The number of values of κ to try first."""
    refined: int = 12
    """The number of intervals between these values to halve afterwards."""
    halvings: int = 30
    """The number of bisection steps that find the largest κ at which every stage has enough bytes for some plan."""
    combinations: int = 1000
    """Combinations of one candidate plan per stage are all tried if they are at most so many."""
    lowered: int = 12
    """The largest number of budgets to try when searching for a rank's smallest budget."""
    peak_weights: tuple[float, ...] = (0.0, 0.5, 1.0)
    """In the search for a rank's smallest budget: weights of the smallest peak against the smallest κ."""


LIMITS = RankSearchLimits()


class StagePlanner(Protocol):
    """The interface of a planner for problems such as that of a pipeline's stage. ``starts``, in all methods: known
    plans of the problem to start from."""

    def within(self, graph: TrainingGraph, budget: int, starts: Sequence[Plan]) -> Plan:
        """Return the cheapest plan found whose peak is within ``budget`` bytes.

        Raises:
            InfeasibleBudget: no plan is found that fits.
        """

    def least(self, graph: TrainingGraph, starts: Sequence[Plan]) -> Plan:
        """Return the plan with the smallest peak that is found.

        Raises:
            InfeasibleBudget: the planner does not search for the smallest peak.
        """

    def floor(self, graph: TrainingGraph, budget: int) -> float:
        """Return a proven lower bound of the overhead of any plan within ``budget`` bytes; infinity if it is proven
        that no plan fits."""


@dataclass(frozen=True)
class RankPlan:
    """The plans of a rank's stages.

    ``stages``: the memory and times of each stage under its plan. ``plans``: for each stage, its plan of the graph of
    its problem. ``peak``: the most bytes that the rank holds. ``extra``: microseconds of recomputation for one
    micro-batch, in all stages together. ``floor``: a proven lower bound of ``extra``.
    """

    stages: tuple[StagePlan, ...]
    plans: tuple[Plan, ...]
    peak: int
    extra: float
    floor: float


@dataclass(frozen=True)
class _Candidate:
    plan: Plan
    figures: StagePlan


_Chosen: TypeAlias = tuple[_Candidate, ...]
"""For each stage, one of its candidate plans."""


class RankSearch:
    """The search for the plans of one rank, with which the rank stays within its budget.

    ``stages``: the planning problem of each stage. ``actions``: the rank's actions in order. ``budget``: bytes that
    the rank may hold, states and torch's buffers included. ``planner``: plans single problems. ``seconds``: after so
    many seconds, and once plans fit, the planner is not called again. ``starts``: for each stage, further plans to
    start from. ``kept``: for each stage, the most bytes that a plan may keep for a micro-batch between forward and
    backward; at least one of the stage's starts, or its plan without recomputation, must keep no more. Empty: no
    limit.
    """

    def __init__(
        self,
        stages: Sequence[StageProblem],
        actions: RankActions,
        budget: int,
        planner: StagePlanner,
        seconds: float = math.inf,
        starts: Sequence[Sequence[Plan]] = (),
        kept: Sequence[int] = (),
    ) -> None:
        self.until = time.monotonic() + seconds
        self.stages, self.actions, self.budget, self.planner = tuple(stages), actions, budget, planner
        self.found: list[list[_Candidate]] = [[] for _ in self.stages]
        self.kept = tuple(kept) or (math.inf,) * len(self.stages)
        for at, stage in enumerate(self.stages):
            for plan in (no_recompute(stage.graph), *(starts[at] if starts else ())):
                self._take(at, plan)
        self.rank = RankRoom(self.stages, actions, tuple(found[0].figures for found in self.found))
        self.intervals: dict[tuple[float, float], tuple[float, ...]] = {}

    def run(self) -> RankPlan:
        """Return the cheapest plans found with which the rank stays within the budget.

        Raises:
            InfeasibleBudget: no plans are found that fit. The error states the smallest budget found for the rank.
        """
        if (best := self._best()) is None or _extra(best) > 0:
            self._search()
            best = self._best()
        if best is None:
            smallest = self.least()
            best = self._best()  # the search for the smallest budget may find plans that fit this one
            if best is None:
                raise InfeasibleBudget("in_flight", self.budget, smallest, "searched")
        figures, plans = tuple(c.figures for c in best), tuple(c.plan for c in best)
        extra = _extra(best)
        floor = min(extra, self._floor()) if extra > 0 else 0.0
        return RankPlan(figures, plans, self._peak(best), extra, floor)

    def least(self) -> int:
        """Return the smallest peak of the rank, in bytes, for which a search finds plans. All plans found become
        candidates for `run`."""
        for at, stage in enumerate(self.stages):
            op = stage.graph.op[stage.boundary]
            span = max(0, min_peak_bound(stage.graph).bytes - stage.graph.input_bytes - stage.least_kept)
            for share in LIMITS.peak_weights:
                graph = stage.with_room(max(op.workspace, int(share * span)))
                self._take(at, self.planner.least(graph, self._starts(at, graph)))
        high = self._peak(self._choose(lambda chosen: (self._peak(chosen), _extra(chosen))))
        low = self.budget  # no plans are found for it
        for k in range(LIMITS.lowered):
            # The last tries are for one byte less, so that the reported budget is the smallest that succeeds.
            ask = high - 1 if k >= LIMITS.lowered // 2 else (low + high) // 2
            found = None if ask <= low else self._at(ask)
            if found is not None:
                high = found
            elif k < LIMITS.lowered // 2:
                low = max(low, ask)
            else:
                break
        return high

    def _at(self, budget: int) -> int | None:
        """Return the peak, in bytes, of the plans that a search finds for another budget, starting from all known
        plans; None if none fit."""
        other = copy(self)  # it shares the candidates
        other.budget = budget
        if other._best() is None:
            other._search()
        best = other._best()
        return None if best is None else other._peak(best)

    def _search(self) -> None:
        """Try the grid. Then halve the interval with the least lower bound, until no bound is below the best plan."""
        most = self._most_share()
        shares = sorted({*(most * k / (LIMITS.grid - 1) for k in range(LIMITS.grid)), 1.0})
        for share in reversed(shares):
            self._try(share)
            if self._late and self._best() is not None:
                break
        self.intervals = {(low, high): self._floors(low, high) for low, high in pairwise((0.0, *shares))}
        for _ in range(LIMITS.refined):
            best = self._best()
            most_extra = math.inf if best is None else _extra(best)
            open_ = {
                one: cost
                for one, floors in self.intervals.items()
                if (cost := math.fsum(floors)) < most_extra - CLOSED
                and self.rank.bounds(one[0]) != self._middle(one)
            }
            if not open_ or (best is not None and self._late):
                return
            low, high = one = min(open_, key=lambda one: (open_[one], one))
            middle = (low + high) / 2
            self._try(middle)
            del self.intervals[one]
            for part in ((low, middle), (middle, high)):
                self.intervals[part] = self._floors(*part)

    @property
    def _late(self) -> bool:
        return time.monotonic() > self.until

    def _middle(self, interval: tuple[float, float]) -> list[Bounds]:
        return self.rank.bounds(sum(interval) / 2)

    def _most_share(self) -> float:
        """Return the largest share (see `RankRoom.bounds`) at which every stage has enough bytes for some plan; 0 if
        there is none."""
        low, high = 0.0, 1.0
        if self._roomy(high):
            return high
        for _ in range(LIMITS.halvings):
            middle = (low + high) / 2
            low, high = (middle, high) if self._roomy(middle) else (low, middle)
        return low

    def _roomy(self, share: float) -> bool:
        bounds = self.rank.bounds(share)
        return all(
            self.rank.room(at, self.budget, bounds) >= min_peak_bound(stage.graph).bytes
            for at, stage in enumerate(self.stages)
        )

    def _try(self, share: float) -> None:
        """Plan each stage with a limit on the bytes kept between forward and backward; ``share``: see
        `RankRoom.bounds`."""
        bounds = self.rank.bounds(share)
        for at, stage in enumerate(self.stages):
            room = self.rank.room(at, self.budget, bounds)
            if room >= min_peak_bound(stage.graph).bytes:
                graph = stage.bounded(room, *bounds[at])
                with suppress(InfeasibleBudget):
                    self._take(at, self.planner.within(graph, room, self._starts(at, graph)))

    def _take(self, at: int, plan: Plan) -> None:
        """Add a plan of some variant of a stage's problem to the candidates."""
        stage = self.stages[at]
        own = replace(plan, estimate=simulate(stage.graph, plan.schedule))
        figures, found = stage.measured(own), self.found[at]
        if figures.kept_bytes <= self.kept[at] and all(figures != c.figures for c in found):
            found.append(_Candidate(own, figures))

    def _starts(self, at: int, graph: TrainingGraph) -> list[Plan]:
        return [replace(c.plan, estimate=simulate(graph, c.plan.schedule)) for c in self.found[at]]

    def _best(self) -> _Chosen | None:
        """Return the cheapest combination that fits the budget, or None."""
        chosen = self._choose(lambda c: (max(0, self._peak(c) - self.budget), _extra(c), self._peak(c)))
        return chosen if self._peak(chosen) <= self.budget else None

    def _choose(self, key: Callable[[_Chosen], tuple[float, ...]]) -> _Chosen:
        """Return the combination of candidates with the least key.

        If there are too many to try all, it is one that no change of a single stage improves.
        """
        if math.prod(map(len, self.found)) <= LIMITS.combinations:
            return min(product(*self.found), key=key)
        chosen = tuple(min(found, key=lambda c: c.figures.kept_bytes) for found in self.found)
        better = True
        while better:
            before = key(chosen)
            for at, found in enumerate(self.found):
                chosen = min(((*chosen[:at], c, *chosen[at + 1 :]) for c in found), key=key)
            better = key(chosen) < before
        return chosen

    def _peak(self, chosen: _Chosen) -> int:
        return rank_peak(self.actions, [c.figures for c in chosen])

    def _floor(self) -> float:
        """Return a lower bound of the rank's recomputation for one micro-batch, in microseconds."""
        by_stage = zip(*self.intervals.values(), strict=True)
        return math.fsum(min(floors) for floors in by_stage)

    def _floors(self, low: float, high: float) -> tuple[float, ...]:
        """Return a lower bound of each stage's recomputation in microseconds, if the stage keeps no more than at the
        share ``high`` and no less than at ``low``, and the other stages keep as little as possible."""
        lowest, small, large = (self.rank.bounds(share) for share in (0.0, low, high))
        floors = []
        for at, stage in enumerate(self.stages):
            bounds = [(small[at][0] if k == at else kept, 0) for k, (kept, _) in enumerate(lowest)]
            room = self.rank.room(at, self.budget, bounds, relaxed=True)
            kept = large[at][0] if high < 1 else self.budget
            if room < min_peak_bound(stage.graph).bytes:
                floors.append(math.inf)
            elif self._late:
                floors.append(0.0)
            else:
                overhead = self.planner.floor(stage.bounded(room, kept), room)
                floors.append(max(0.0, overhead) * stage.graph.base_cost)
        return tuple(floors)


def _extra(chosen: _Chosen) -> float:
    return math.fsum(c.figures.extra for c in chosen)
