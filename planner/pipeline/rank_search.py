"""Plans for the stages of one rank, with several micro-batches in flight, within the rank's budget.

A rank holds the bytes K that a plan keeps from forward to backward once per micro-batch in flight. A limit κ
of each K makes stages independent problems. The result is the cheapest combination of the plans found for
several κ that fits.

Lower bound: any plan's K is between two tried limits κ₁ < κ₂. In that interval its own micro-batch keeps at
most κ₂, the others at least κ₁, and other stages at least their smallest K. The least bound over all
intervals holds for all plans.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from copy import copy
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import pairwise
from typing import Protocol

from rematplan.ir import CHEAP, InfeasibleBudget, TrainingGraph
from rematplan.planner.bounds.cut_bounds import CutBounds, min_peak_bound
from rematplan.planner.core.effort import Effort
from rematplan.planner.core.plan import Plan
from rematplan.planner.core.schedule import Run
from rematplan.planner.pipeline.actions import RankActions
from rematplan.planner.pipeline.lean_plans import find_lean_plans
from rematplan.planner.pipeline.rank_budget_shares import Bounds, RankBudgetShares
from rematplan.planner.pipeline.rank_candidates import RankCandidates, extra
from rematplan.planner.pipeline.rank_memory import in_flight, rank_peak
from rematplan.planner.pipeline.stage_plan import StagePlan
from rematplan.planner.pipeline.stage_problem import StageProblem
from rematplan.planner.strategies.store_all import no_recompute

SHORTEST = 1.0
"""Seconds that all searches for the plans of one rank may always take, even if the time limit is shorter."""
CLOSED = 1e-6
"""Microseconds. A lower bound counts as lower than the time of a plan if the difference is more than this."""


@dataclass(frozen=True)
class RankSearchLimits:
    """The limits of a `RankSearch`, tuned by hand. κ: the limit of the bytes that a stage keeps from forward to
    backward."""

    grid: int = 5
    """The number of values of κ to try first, at equal distances; the K of plans without recomputation is tried as
    well."""
    refined: int = 12
    """The largest number of intervals between tried values of κ to halve afterwards."""
    halvings: int = 30
    """The number of bisection steps that find the largest κ at which every stage has enough bytes for some plan."""
    questions: int = 24
    """About how many searches for plans and lower bounds of a stage share its part of the effort."""
    blocks: float = 0.2
    """The share of a stage's part of the effort for the block plans from which its searches begin."""
    per_op: float = 0.0005
    """The seconds for each op of a stage that a search for its plans may take at least."""
    first: float = 0.5
    """The share of the effort after which the search ends if no plan within the budget is found. The rest is for plans
    with a small peak."""
    little: float = 1 / 64
    """The share of the bytes that plans of all stages can save below which no plans of a stage are searched for."""
    reuse: int = 3
    """The number of plans to search for at each value of κ if ops may write their results into operands."""
    lowered: int = 24
    """In the search for a rank's smallest budget, the number of searches for plans between two known ones."""
    descents: int = 3
    """In the search for a rank's smallest budget, the most searches within one byte less than the smallest peak
    found."""
    cheaper: int = 3
    """The number of budgets to try when searching for the smallest budget at which a rank recomputes little."""


LIMITS = RankSearchLimits()


class StagePlanner(Protocol):
    """Plans single stages of a pipeline, each as a planning problem. ``starts``: known plans of the problem.
    ``effort``: what a search may do.
    """

    def starts(self, graph: TrainingGraph, effort: Effort) -> Sequence[Plan]:
        """Return plans from which searches for any budget begin."""

    def within(
        self, graph: TrainingGraph, budget: int, starts: Sequence[Plan], effort: Effort
    ) -> Plan | None:
        """Return the cheapest plan found whose peak is within ``budget`` bytes, or None. ``starts``: known plans of the
        problem to start from.
        """

    def least(self, graph: TrainingGraph, starts: Sequence[Plan], effort: Effort) -> Plan:
        """Return the plan with the smallest peak that is found. ``starts``: known plans of the problem to
        start from.
        """

    def floor(self, graph: TrainingGraph, budget: int, effort: Effort) -> float:
        """Return a proven lower bound of the overhead (a share of the time without recomputation) within
        ``budget`` bytes; infinite if no plan fits.
        """


@dataclass(frozen=True)
class RankPlan:
    """The plans of all stages of one rank of a pipeline."""

    stages: tuple[StagePlan, ...]
    """The memory and times of each stage."""
    plans: tuple[Plan, ...]
    peak: int
    """The most bytes that the rank holds at any moment of a step."""
    extra: float
    """Microseconds of recomputation for one micro-batch, summed over the stages."""
    floor: float
    """A proven lower bound of ``extra`` within the rank's budget; 0 if nothing is proven."""


class RankSearch:
    """Searches for the cheapest plans of one rank's stages within its budget (bytes, states and torch's buffers
    included). ``effort``: of all searches together, also for other budgets; None: no limit. ``starts``: known plans of
    each stage. ``kept``: for each stage, the most bytes that a plan may keep from forward to backward; empty: no limit.
    Some known plan of each stage must keep no more."""

    def __init__(
        self,
        stages: Sequence[StageProblem],
        actions: RankActions,
        budget: int,
        planner: StagePlanner,
        effort: Effort | None = None,
        starts: Sequence[Sequence[Plan]] = (),
        kept: Sequence[int] = (),
    ) -> None:
        self.effort = self.part = effort or Effort()
        self.stages, self.budget, self.planner = tuple(stages), budget, planner
        self.known = RankCandidates(stages, actions, kept)
        for at, stage in enumerate(self.stages):
            for plan in (no_recompute(stage.graph), *(starts[at] if starts else ())):
                self.known.take(at, plan)
        whole = tuple(found[0].figures for found in self.known.found)
        self.rank = RankBudgetShares(self.stages, actions, whole)
        self.intervals: dict[tuple[float, float], tuple[float, ...]] = {}

    def kept_peak(self) -> int:
        """Return the rank's peak without recomputation, in bytes."""
        return rank_peak(self.known.actions, self.rank.all)

    def run(self, thorough: bool = True) -> RankPlan:
        """Return the cheapest plans found within the budget.

        If there are none, InfeasibleBudget states the smallest budget found and, with ``thorough``, the smallest with
        little recomputation (`CHEAP`). Without ``thorough`` the search for the smallest budget is shorter.
        """
        best = self.known.within(self.budget)
        if best is None or extra(best) > 0:
            self._search()
            best = self.known.within(self.budget)
        if best is None:
            smallest = self.smallest if thorough else self.lean
            if smallest > self.budget:
                cheap = self._least_cheap(smallest) if thorough else 0
                raise InfeasibleBudget("in_flight", self.budget, smallest, "searched", cheap=cheap)
            self._search()
            best = self.known.within(self.budget)
            assert best is not None
        figures, plans = tuple(c.figures for c in best), tuple(c.plan for c in best)
        floor = min(extra(best), self._floor()) if extra(best) > 0 else 0.0
        return RankPlan(figures, plans, self.known.peak(best), extra(best), floor)

    def brief_overhead(self) -> float:
        """Return the overhead of the cheapest plans that a brief search finds, a share of the stages' time. If none
        fit, InfeasibleBudget states the smallest peak found."""
        best = self.known.within(self.budget)
        if best is None:
            self._search()
            best = self.known.within(self.budget)
        if best is None:
            self.part = self.effort
            smallest = find_lean_plans(self.known, self._least, 0, self.budget, self._order)
            best = self.known.within(self.budget)
        if best is None:
            raise InfeasibleBudget("in_flight", self.budget, smallest, "searched")
        cost = math.fsum(stage.graph.base_cost for stage in self.stages)
        return extra(best) / cost if cost else 0.0

    @cached_property
    def smallest(self) -> int:
        """The smallest peak (bytes) found in a few searches, which end once it is within the budget. The
        plans found become candidates.
        """
        peak = self.lean
        # The budget only ends this loop. So a search with the result as its budget finds plans, and one with
        # a byte less does not, if each planning of a stage has the same result again.
        for _ in range(LIMITS.descents):
            if peak <= self.budget or self.effort.over:
                break
            self.with_budget(peak - 1)._search()
            before, peak = peak, self.known.peak(self.known.leanest())
            if peak == before:
                break
        return peak

    @cached_property
    def lean(self) -> int:
        """The smallest peak of the rank, in bytes, after the search for lean plans (`find_lean_plans`), which begins
        when this property is first read."""
        self.part = self.effort.part(LIMITS.first * self.effort.left)
        self._begin()
        return find_lean_plans(self.known, self._least, LIMITS.lowered, self.budget, self._order)

    def _least(self, at: int, graph: TrainingGraph, starts: Sequence[Plan]) -> Plan | None:
        """Return a plan of a stage with a small peak; None if the effort is spent, or recomputation saves little in
        the stage."""
        if self._late or not self._gains[at]:
            return None
        return self.planner.least(graph, starts, self._question(at))

    def _least_cheap(self, smallest: int) -> int:
        """Return the smallest peak (bytes) of plans found whose recomputation takes at most `CHEAP` of the
        stages' time.

        ``smallest``: bytes, below the budgets that are tried.
        """
        allowed = CHEAP * math.fsum(stage.graph.base_cost for stage in self.stages)

        def peak() -> int:
            return self.known.peak(
                self.known.choose(lambda c: (max(0.0, extra(c) - allowed), self.known.peak(c)))
            )

        low, high = smallest, peak()
        for _ in range(LIMITS.cheaper):
            if self.effort.over:
                break
            other = self.with_budget((low + high) // 2)
            other._search()
            low, high = (low, peak()) if peak() <= other.budget else (other.budget, high)
        return high

    def with_budget(self, budget: int) -> RankSearch:
        """Return a search like this one for another budget in bytes. Both share their candidates and their effort."""
        other = copy(self)
        other.budget = budget
        return other

    def _search(self) -> None:
        """Plan the stages with several limits of the bytes kept between forward and backward, unless plans fit and
        the effort is spent. Plans found become candidates; lower bounds for ranges of limits go to ``intervals``."""
        fits = self.known.within(self.budget) is not None
        if fits and self.effort.over:
            return
        self.part = self.effort.part((1.0 if fits else LIMITS.first) * self.effort.left)
        self._begin()
        most = self._share(lambda at, _: _least_bytes(self.stages[at]))
        shares = sorted({*(most * k / (LIMITS.grid - 1) for k in range(LIMITS.grid)), 1.0})
        guess = min(most, self._share(self._even_room))
        for share in (guess, *sorted(shares, key=lambda share: abs(share - guess))):
            self._try(share)
            if self._late:
                break
        if self.known.within(self.budget) is not None:
            self.part = self.effort
        shares = sorted({*shares, guess})
        self.intervals = {(low, high): self._floors(low, high) for low, high in pairwise((0.0, *shares))}
        # Halve the interval between limits that has the least lower bound, while one below the best plans'
        # recomputation is left.
        for _ in range(LIMITS.refined):
            best = self.known.within(self.budget)
            most_extra = math.inf if best is None else extra(best)
            open_ = {
                one: cost
                for one, floors in self.intervals.items()
                if (cost := math.fsum(floors)) < most_extra - CLOSED
                and self.rank.bounds(one[0]) != self._middle(one)
            }
            if not open_ or self._late:
                return
            low, high = one = min(open_, key=lambda one: (open_[one], one))
            middle = (low + high) / 2
            self._try(middle)
            del self.intervals[one]
            for part in ((low, middle), (middle, high)):
                self.intervals[part] = self._floors(*part)

    def _begin(self) -> None:
        """Make the planner's starting plans candidates, once for each stage whose recomputation can save much
        (`_gains`)."""
        for at in self._order:
            if self._gains[at] and at not in self.known.begun:
                self.known.begun.add(at)
                amount = LIMITS.blocks * self._gains[at] * self.effort.total
                for plan in self.planner.starts(self.stages[at].graph, self.part.part(amount)):
                    self.known.take(at, plan)

    @cached_property
    def _gains(self) -> tuple[float, ...]:
        """For each stage, its share of the bytes that plans of all stages can save; 0 if the share is at most
        `LIMITS.little`."""
        most = in_flight(self.known.actions)
        saved = []
        for stage, whole in zip(self.stages, self.rank.all, strict=True):
            kept = most.get(whole.stage, 0) * max(0, whole.held.kept - stage.least_kept)
            saved.append(kept + max(0, no_recompute(stage.graph).peak - _least_bytes(stage)))
        shares = [bytes_ / max(1, sum(saved)) for bytes_ in saved]
        return tuple(share if share > LIMITS.little else 0.0 for share in shares)

    @property
    def _order(self) -> list[int]:
        """The stages in which recomputation saves most come first."""
        return sorted(range(len(self.stages)), key=lambda at: -self._gains[at])

    def _question(self, at: int) -> Effort:
        """Return the effort for one search for plans, or one lower bound, of a stage."""
        least = self.part.of(LIMITS.per_op * len(self.stages[at].graph.ops))
        return self.part.part(max(least, self._gains[at] * self.effort.total / LIMITS.questions))

    @property
    def _late(self) -> bool:
        return self.part.over

    def _middle(self, interval: tuple[float, float]) -> list[Bounds]:
        return self.rank.bounds(sum(interval) / 2)

    def _share(self, room: Callable[[int, int], int]) -> float:
        """Return the largest share of the bytes that can be kept, from 0 (the least) to 1 (all), at which each stage's
        budget is at least ``room(index of the stage, bytes kept)``; 0 if there is none."""

        def fits(share: float) -> bool:
            bounds = self.rank.bounds(share)
            return all(
                self.rank.stage_budget(at, self.budget, bounds) >= room(at, kept)
                for at, (kept, _) in enumerate(bounds)
            )

        low, high = 0.0, 1.0
        if fits(high):
            return high
        for _ in range(LIMITS.halvings):
            middle = (low + high) / 2
            low, high = (middle, high) if fits(middle) else (low, middle)
        return low

    def _even_room(self, at: int, kept: int) -> int:
        """Return the peak of a stage that keeps ``kept`` bytes, if its backward needs as many in addition as
        without recomputation.
        """
        whole = self.rank.all[at]
        return self.stages[at].graph.input_bytes + kept + whole.transients.backward - whole.held.kept

    def _try(self, share: float) -> None:
        """Plan the stages with the limits of a share (`RankBudgetShares.bounds`), except those that can save little
        (`_gains`) or have too few bytes. The plans found become candidates."""
        bounds = self.rank.bounds(share)
        for at, stage in enumerate(self.stages):
            room = self.rank.stage_budget(at, self.budget, bounds)
            if self._gains[at] and room >= _least_bytes(stage):
                self._plan(at, room, bounds[at])

    def _plan(self, at: int, room: int, bounds: Bounds) -> None:
        """Plan a stage within ``room`` bytes and ``bounds``. The plans found become candidates."""
        stage, reusing = self.stages[at], {*self.stages[at].reusable}
        limited = replace(stage, graph=stage.bounded(room, *bounds))
        # First assume that ops write into operands wherever they can, then that the ops which exceeded
        # ``room`` need new tensors, at last that all do.
        for searches_left in reversed(range(LIMITS.reuse if reusing else 1)):
            reusing = reusing if searches_left else set()
            graph = stage.assuming_reuse(reusing).bounded(room + stage.most_reused, *bounds)
            starts, effort = self.known.starts(at, graph), self._question(at)
            plan = self.planner.within(graph, room + stage.most_reused, starts, effort)
            if plan is None:
                continue
            self.known.take(at, plan)
            resident = zip(plan.schedule, limited.resident(plan.schedule), strict=True)
            exceeding = {step.op for step, bytes_ in resident if isinstance(step, Run) and bytes_ > room}
            if not exceeding:
                return
            reusing -= exceeding

    def _floor(self) -> float:
        """Return a lower bound of the microseconds of recomputation for one micro-batch, in all stages of the rank
        together."""
        by_stage = zip(*self.intervals.values(), strict=True)
        return math.fsum(min(floors) for floors in by_stage)

    def _floors(self, low: float, high: float) -> tuple[float, ...]:
        """Return, for each stage, a lower bound of the microseconds recomputed per micro-batch if it keeps between the
        shares ``low`` and ``high``; infinite if no plan fits. Shares go from 0, the least that any plan keeps, to
        1, which means no limit."""
        lowest, small, large = (self.rank.bounds(share) for share in (0.0, low, high))
        floors = []
        for at, stage in enumerate(self.stages):
            bounds = [(small[at][0] if k == at else kept, 0) for k, (kept, _) in enumerate(lowest)]
            room = self.rank.stage_budget(at, self.budget, bounds, relaxed=True)
            kept = large[at][0] if high < 1 else self.budget
            if room < _least_bytes(stage):
                floors.append(math.inf)
            else:
                room += stage.most_reused
                graph = stage.reusing.bounded(room, kept)
                if self._late or not self._gains[at]:  # a bound without a search
                    overhead = CutBounds(graph, room).best.overhead
                else:
                    overhead = self.planner.floor(graph, room, self._question(at))
                floors.append(max(0.0, overhead) * stage.graph.base_cost)
        return tuple(floors)


def plans_of_ranks(
    search: Callable[[int, int], RankSearch], ranks: Iterable[int], budget: int
) -> dict[int, RankPlan]:
    """Return the cheapest plans found for each rank of a pipeline, by the rank's number. If a rank's plans do not fit
    ``budget``, `InfeasibleBudget` states the smallest budget found that is enough for all ranks. ``search``: makes the
    search of a rank for a budget in bytes."""
    found: dict[int, RankPlan] = {}
    refused, enough = None, budget
    for rank in ranks:
        own = search(rank, enough)
        if refused is not None and own.smallest <= enough:
            continue  # the budget of the refused rank is enough for this one
        try:
            found[rank] = own.run()
        except InfeasibleBudget as error:
            refused, enough = replace(error, strategy=f"rank {rank}", budget=budget), error.smallest
    if refused is not None:
        raise refused
    return found


def _least_bytes(stage: StageProblem) -> int:
    """Return a lower bound of the bytes that any plan of a stage needs for one micro-batch, inputs included."""
    return min_peak_bound(stage.reusing.graph).bytes - stage.most_reused
