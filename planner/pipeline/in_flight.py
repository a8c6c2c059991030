"""Plans for the stages of one rank of a pipeline, with several micro-batches in flight, within the rank's budget.

The bytes that a plan of a stage keeps between forward and backward are called K. A rank holds K once for each
micro-batch in flight. Other bytes of the plan are needed only during an action, so the rank holds them once. If the K
of each stage is at most a limit κ, the bytes that are left for each action are known. Then `StageProblem.bounded` turns
the planning of a stage into a planning problem without micro-batches.

First, plans with small peaks are searched for (`lean_plans`). If the rank's peak is still above the budget, the budget
is refused. Otherwise the search lowers the cost. It tries values of κ: first a grid between the smallest K and the K
without recomputation, then values around the best. Each plan found is measured and becomes a candidate of its stage.
The result is the cheapest combination of candidates with which the rank's actions stay within the budget.

The lower bound: the K of any plan is in one of the intervals (κ₁, κ₂] between tried values. Then the stage keeps at
most κ₂ for the micro-batch of an action, at least κ₁ for each other micro-batch, and every other stage keeps at least
its smallest K. The smallest of the lower bounds of these relaxed problems, over all intervals, holds for all plans.

An op may write its result into an operand that its plan frees directly afterwards (`StageProblem.reused`). Lower bounds
assume that each op does so where it can. The search assumes the same first, and checks the plan that it finds.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from contextlib import suppress
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
from rematplan.planner.pipeline.actions import RankActions, StagePlan
from rematplan.planner.pipeline.lean_plans import find_lean_plans
from rematplan.planner.pipeline.rank_budget_shares import Bounds, RankBudgetShares
from rematplan.planner.pipeline.rank_candidates import RankCandidates, extra
from rematplan.planner.pipeline.stage_problem import StageProblem
from rematplan.planner.strategies.store_all import no_recompute

CLOSED = 1e-6
"""Microseconds. A lower bound counts as lower than the time of a plan if the difference is more than this."""


@dataclass(frozen=True)
class RankSearchLimits:
    """The limits of a `RankSearch`, chosen by trial without a record of single measurements. κ: the limit of the bytes
    that a stage keeps for a micro-batch between forward and backward."""

    grid: int = 5
    """The number of values of κ to try first, at equal distances; the K of plans without recomputation is tried as
    well."""
    refined: int = 12
    """The largest number of intervals between tried values of κ to halve afterwards."""
    halvings: int = 30
    """The number of bisection steps that find the largest κ at which every stage has enough bytes for some plan."""
    reuse: int = 3
    """The number of plans to search for at each value of κ if ops may write their results into operands."""
    lowered: int = 24
    """In the search for a rank's smallest budget, the number of searches for plans between two known ones."""
    descents: int = 3
    """In this search, the largest number of searches for plans within one byte less than the smallest peak found."""
    cheaper: int = 3
    """The number of budgets to try when searching for the smallest budget at which a rank recomputes little."""


LIMITS = RankSearchLimits()


class StagePlanner(Protocol):
    """The interface of a planner for single stages of a pipeline, each as a planning problem (``graph``). ``starts``,
    in all methods: known plans of the problem to start from."""

    def within(self, graph: TrainingGraph, budget: int, starts: Sequence[Plan]) -> Plan:
        """Return the cheapest plan found whose peak is within ``budget`` bytes. ``starts``: known plans of the problem
        to start from.
        """

    def least(self, graph: TrainingGraph, starts: Sequence[Plan]) -> Plan:
        """Return the plan with the smallest peak that is found. ``starts``: known plans of the problem to
        start from.
        """

    def floor(self, graph: TrainingGraph, budget: int) -> float:
        """Return a proven lower bound of the overhead (a share of the time without recomputation) of any plan within
        ``budget`` bytes; infinity if it is proven that no plan fits."""


@dataclass(frozen=True)
class RankPlan:
    """The plans of all stages of one rank of a pipeline.

    ``stages``: the memory and times of each stage. ``plans``: the plan of each stage. ``peak``: the most bytes that the
    rank holds at any moment of a step. ``extra``: microseconds of recomputation for one micro-batch, summed over the
    stages. ``floor``: a proven lower bound of ``extra`` for any plans with which the rank stays within its budget; 0 if
    nothing is proven.
    """

    stages: tuple[StagePlan, ...]
    plans: tuple[Plan, ...]
    peak: int
    extra: float
    floor: float


class RankSearch:
    """Searches for the cheapest plans of the stages of one rank with which the rank stays within its budget.

    ``stages``: the planning problem of each stage. ``actions``: the rank's actions in order. ``budget``: bytes of
    memory for the rank, including states and torch's buffers. ``planner``: plans single stages. ``seconds``: how long
    cheap plans within the budget are searched for. If none are found, searches for the smallest budget take up to five
    times as long. ``starts``: for each stage, known plans in addition to the plan without recomputation. ``kept``: for
    each stage, the most bytes that a plan may keep for a micro-batch between forward and backward; empty: no limit. At
    least one known plan of each stage must keep no more.
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
        self.seconds, self.effort = seconds, Effort()
        self.stages, self.budget, self.planner = tuple(stages), budget, planner
        self.known = RankCandidates(stages, actions, kept)
        for at, stage in enumerate(self.stages):
            for plan in (no_recompute(stage.graph), *(starts[at] if starts else ())):
                self.known.take(at, plan)
        whole = tuple(found[0].figures for found in self.known.found)
        self.rank = RankBudgetShares(self.stages, actions, whole)
        self.intervals: dict[tuple[float, float], tuple[float, ...]] = {}

    def run(self, thorough: bool = True) -> RankPlan:
        """Return the cheapest plans found with which the rank stays within the budget.

        ``thorough``: whether to search as long as `smallest` does before the budget is refused. If not, the error
        states a larger budget, and no budget at which little is recomputed.
        """
        best = self.known.within(self.budget)
        if best is None or extra(best) > 0:
            smallest = self.smallest if thorough else self.lean
            if thorough and smallest > self.budget:
                cheap = self._least_cheap(smallest)
                raise InfeasibleBudget("in_flight", self.budget, smallest, "searched", cheap=cheap)
            self._search()
            best = self.known.within(self.budget)
            if best is None:
                raise InfeasibleBudget("in_flight", self.budget, smallest, "searched")
        figures, plans = tuple(c.figures for c in best), tuple(c.plan for c in best)
        floor = min(extra(best), self._floor()) if extra(best) > 0 else 0.0
        return RankPlan(figures, plans, self.known.peak(best), extra(best), floor)

    @cached_property
    def smallest(self) -> int:
        """The smallest peak of the rank, in bytes, for which a search finds plans, or a larger one within the budget.
        The plans found become candidates.

        First, lean plans are searched for; then, up to `LIMITS.descents` times, plans within one byte less than the
        smallest peak so far. The budget only ends the search. So if the result exceeds the budget, a search with the
        result as the budget finds plans, and one with a byte less does not, provided that each planning of a stage has
        the same result again.
        """
        peak = self.lean
        for _ in range(LIMITS.descents):
            if peak <= self.budget:
                break
            self._with_budget(peak - 1)._search()
            before, peak = peak, self.known.peak(self.known.leanest())
            if peak == before:
                break
        return peak

    @cached_property
    def lean(self) -> int:
        """The smallest peak of the rank, in bytes, after the search for lean plans (`find_lean_plans`), which begins
        when this property is first read."""
        return find_lean_plans(self.known, self.planner.least, LIMITS.lowered, self.budget)

    def _least_cheap(self, smallest: int) -> int:
        """Return the smallest peak of the rank, in bytes, of plans found whose recomputation takes at most `CHEAP`
        (5 %) of the time of the rank's stages without recomputation.

        ``smallest``: bytes. `LIMITS.cheaper` budgets above it are tried. Together they take about as long as `run` may.
        """
        allowed = CHEAP * math.fsum(stage.graph.base_cost for stage in self.stages)

        def peak() -> int:
            return self.known.peak(
                self.known.choose(lambda c: (max(0.0, extra(c) - allowed), self.known.peak(c)))
            )

        low, high = smallest, peak()
        for _ in range(LIMITS.cheaper):
            other = self._with_budget((low + high) // 2, self.seconds / LIMITS.cheaper)
            other._search()
            low, high = (low, peak()) if peak() <= other.budget else (other.budget, high)
        return high

    def _with_budget(self, budget: int, seconds: float | None = None) -> RankSearch:
        """Return a search like this one for another budget, in bytes. Both have the same candidates.

        ``seconds``: how long the other search may take; None: as long as this one.
        """
        other = copy(self)
        other.budget, other.seconds = budget, self.seconds if seconds is None else seconds
        return other

    def _search(self) -> None:
        """Plan the stages with several limits of the bytes that they keep between forward and backward. Plans found
        become candidates.

        First, limits at equal distances are tried. Between each two neighbouring limits is an interval with a lower
        bound of the microseconds of recomputation. The interval with the least lower bound is halved, and the limit in
        its middle is tried; this is repeated. The search ends when no interval that can still be halved has a lower
        bound below the recomputation of the best plans, after `LIMITS.refined` intervals, or when time is over.
        """
        self.effort = Effort(self.seconds)
        most = self._share(self._least_room)
        shares = sorted({*(most * k / (LIMITS.grid - 1) for k in range(LIMITS.grid)), 1.0})
        guess = min(most, self._share(self._even_room))
        for share in (guess, *sorted(shares, key=lambda share: abs(share - guess))):
            self._try(share)
            if self._late:
                break
        shares = sorted({*shares, guess})
        self.intervals = {(low, high): self._floors(low, high) for low, high in pairwise((0.0, *shares))}
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

    @property
    def _late(self) -> bool:
        return self.effort.over

    def _middle(self, interval: tuple[float, float]) -> list[Bounds]:
        return self.rank.bounds(sum(interval) / 2)

    def _share(self, room: Callable[[int, int], int]) -> float:
        """Return the largest share at which every stage has enough bytes for its plan; 0 if there is none.

        A share (0 to 1) sets limits of the bytes that stages keep between forward and backward, from the least possible
        to those without recomputation (`RankBudgetShares.bounds`). ``room``: from the index of a stage and its limit,
        the bytes that are enough, with the inputs of its graph.
        """

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

    def _least_room(self, at: int, kept: int) -> int:
        """Return the bytes below which a stage has no plan, whatever it keeps between forward and backward."""
        del kept
        return _least_bytes(self.stages[at])

    def _even_room(self, at: int, kept: int) -> int:
        """Return the peak of a stage that keeps ``kept`` bytes, if its backward needs as many bytes in addition as
        without recomputation."""
        whole = self.rank.all[at]
        return self.stages[at].graph.input_bytes + kept + whole.transient_backward - whole.kept_bytes

    def _try(self, share: float) -> None:
        """Plan each stage with a limit of the bytes that it keeps between forward and backward. The plans found become
        candidates.

        ``share``: sets the limits, from 0 (the least possible) to 1 (as many as without recomputation); see
        `RankBudgetShares.bounds`.
        """
        bounds = self.rank.bounds(share)
        for at, stage in enumerate(self.stages):
            room = self.rank.stage_budget(at, self.budget, bounds)
            if room >= _least_bytes(stage):
                with suppress(InfeasibleBudget):
                    self._plan(at, room, bounds[at])

    def _plan(self, at: int, room: int, bounds: Bounds) -> None:
        """Plan a stage within ``room`` bytes and ``bounds``. The plans found become candidates.

        The first plan is searched for as if ops always wrote their results into operands where they can. If it exceeds
        ``room``, because its schedule does not free these operands, the next search assumes that the ops which exceed
        it need new tensors. The last search assumes this of all ops, so its plan fits.
        """
        stage, reusing = self.stages[at], {*self.stages[at].reusable}
        limited = replace(stage, graph=stage.bounded(room, *bounds))
        for searches_left in reversed(range(LIMITS.reuse if reusing else 1)):
            reusing = reusing if searches_left else set()
            graph = stage.assuming_reuse(reusing).bounded(room + stage.most_reused, *bounds)
            try:
                plan = self.planner.within(graph, room + stage.most_reused, self.known.starts(at, graph))
            except InfeasibleBudget:
                if searches_left:
                    continue
                raise
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
        """Return, for each stage, a lower bound of the microseconds that it recomputes for a micro-batch, if the bytes
        that it keeps between forward and backward are between two limits. The other stages are assumed to keep as few
        bytes as possible. A lower bound is infinite if it is proven that no plan fits the budget.

        ``low``, ``high``: the limits, as shares from 0 (the least possible) to 1 (as many as without recomputation); a
        ``high`` of 1 means no limit.
        """
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
                quick = self._late  # then a bound without a search
                overhead = CutBounds(graph, room).best.overhead if quick else self.planner.floor(graph, room)
                floors.append(max(0.0, overhead) * stage.graph.base_cost)
        return tuple(floors)


def plans_of_ranks(
    search: Callable[[int, int], RankSearch], ranks: Iterable[int], budget: int
) -> dict[int, RankPlan]:
    """Return the cheapest plans found for each rank of a pipeline, by the number of the rank."""
    found: dict[int, RankPlan] = {}
    refused, enough = None, budget
    for rank in ranks:
        own = search(rank, enough)
        if refused is not None and own.smallest <= enough:
            continue  # the budget of the refused rank is enough for this one
        try:
            found[rank] = own.run()
        except InfeasibleBudget as error:
            refused, enough = error.changed(strategy=f"rank {rank}", budget=budget), error.smallest
    if refused is not None:
        raise refused
    return found


def _least_bytes(stage: StageProblem) -> int:
    """Return a lower bound of the bytes that any plan of a stage needs for one micro-batch, inputs included."""
    return min_peak_bound(stage.reusing.graph).bytes - stage.most_reused
