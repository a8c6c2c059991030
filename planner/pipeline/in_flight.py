"""Plans for the stages of one rank of a pipeline, with several micro-batches in flight, within the rank's budget.

The bytes that a plan of a stage keeps between forward and backward are called K. A rank holds K once for each
micro-batch in flight. Other bytes of the plan are needed only during an action, so the rank holds them once. If the K
of each stage is at most a limit κ, the bytes that are left for each action are known. Then `StageProblem.bounded` turns
the planning of a stage into a planning problem without micro-batches.

So the search tries values of κ: first a grid between the smallest K and the K without recomputation, then values around
the best. Each plan found is measured and becomes a candidate of its stage. The result is the cheapest combination of
candidates with which the rank's actions stay within the budget.

The lower bound: the K of any plan is in one of the intervals (κ₁, κ₂] between tried values. Then the stage keeps at
most κ₂ for the micro-batch of an action, at least κ₁ for each other micro-batch, and every other stage keeps at least
its smallest K. The smallest of the lower bounds of these relaxed problems, over all intervals, holds for all plans.

An op may write its result into an operand that its plan frees directly afterwards (`StageProblem.reused`). Lower bounds
assume that each op does so where it can. The search assumes the same first, and checks the plan that it finds.
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

from rematplan.ir import CHEAP, InfeasibleBudget, TrainingGraph
from rematplan.planner.bounds.cut_bounds import min_peak_bound
from rematplan.planner.core.plan import Plan
from rematplan.planner.core.schedule import Run
from rematplan.planner.core.simulator import simulate
from rematplan.planner.pipeline.actions import RankActions, StagePlan
from rematplan.planner.pipeline.rank_budget_shares import Bounds, RankBudgetShares
from rematplan.planner.pipeline.rank_memory import rank_peak
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
    combinations: int = 1000
    """All combinations of one candidate plan for each stage are tried if there are at most this many."""
    lowered: int = 12
    """The largest number of budgets to try when searching for a rank's smallest budget."""
    cheaper: int = 3
    """The number of budgets to try when searching for the smallest budget at which a rank recomputes little."""
    peak_weights: tuple[float, ...] = (0.0, 0.5, 1.0)
    """In the search for a rank's smallest budget, a plan of small peak is searched for with each of these weights. The
    weight sets the workspace of the op between forward and backward: with 0 only the peak counts, with 1 the plan must
    also keep the fewest bytes at this op."""


LIMITS = RankSearchLimits()


class StagePlanner(Protocol):
    """The interface of a planner for single stages of a pipeline, each as a planning problem (``graph``). ``starts``,
    in all methods: known plans of the problem to start from."""

    def within(self, graph: TrainingGraph, budget: int, starts: Sequence[Plan]) -> Plan:
        """Return the cheapest plan found whose peak is within ``budget`` bytes. ``starts``: known plans of the problem
        to start from.

        Raises:
            InfeasibleBudget: no plan is found that fits.
        """

    def least(self, graph: TrainingGraph, starts: Sequence[Plan]) -> Plan:
        """Return the plan with the smallest peak that is found. ``starts``: known plans of the problem to start from.

        Raises:
            InfeasibleBudget: this planner does not search for the smallest peak.
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


@dataclass(frozen=True)
class _Candidate:
    plan: Plan
    figures: StagePlan


_Chosen: TypeAlias = tuple[_Candidate, ...]
"""For each stage, one of its candidate plans."""


class RankSearch:
    """Searches for the cheapest plans of the stages of one rank with which the rank stays within its budget.

    ``stages``: the planning problem of each stage. ``actions``: the rank's actions in order. ``budget``: bytes of
    memory for the rank, including states and torch's buffers. ``planner``: plans single stages. ``seconds``: when the
    search has taken so long, it ends as soon as it has plans that fit. ``starts``: for each stage, known plans in
    addition to the plan without recomputation. ``kept``: for each stage, the most bytes that a plan may keep for a
    micro-batch between forward and backward; empty: no limit. At least one known plan of each stage must keep no more.
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
        self.seconds, self.until = seconds, time.monotonic() + seconds
        self.stages, self.actions, self.budget, self.planner = tuple(stages), actions, budget, planner
        self.found: list[list[_Candidate]] = [[] for _ in self.stages]
        self.kept = tuple(kept) or (math.inf,) * len(self.stages)
        for at, stage in enumerate(self.stages):
            for plan in (no_recompute(stage.graph), *(starts[at] if starts else ())):
                self._take(at, plan)
        self.rank = RankBudgetShares(self.stages, actions, tuple(found[0].figures for found in self.found))
        self.intervals: dict[tuple[float, float], tuple[float, ...]] = {}

    def run(self) -> RankPlan:
        """Return the cheapest plans found with which the rank stays within the budget.

        Raises:
            InfeasibleBudget: no plans are found that fit. The error states the smallest budget found for the rank, and
                a budget at which recomputation takes at most 5 % of the time.
        """
        if (best := self._best()) is None or _extra(best) > 0:
            self._search()
            best = self._best()
        if best is None:
            smallest = self.least()
            best = self._best()  # the search for the smallest budget may find plans that fit this one
            if best is None:
                cheap = self._least_cheap(smallest)
                raise InfeasibleBudget("in_flight", self.budget, smallest, "searched", cheap=cheap)
        figures, plans = tuple(c.figures for c in best), tuple(c.plan for c in best)
        extra = _extra(best)
        floor = min(extra, self._floor()) if extra > 0 else 0.0
        return RankPlan(figures, plans, self._peak(best), extra, floor)

    def least(self) -> int:
        """Return the smallest peak of the rank, in bytes, for which the search finds plans. All plans found on the way
        become candidates for `run`."""
        for at, stage in enumerate(self.stages):
            op = stage.graph.op[stage.boundary]
            span = max(0, min_peak_bound(stage.graph).bytes - stage.graph.input_bytes - stage.least_kept)
            for share in LIMITS.peak_weights:
                for more, problem in {0: stage, stage.most_reused: stage.reusing}.items():
                    graph = problem.with_boundary_workspace(more + max(op.workspace, int(share * span)))
                    self._take(at, self.planner.least(graph, self._starts(at, graph)))
        high = self._peak(self._choose(lambda chosen: (self._peak(chosen), _extra(chosen))))
        low = self.budget  # a budget for which no plans were found
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

    def _least_cheap(self, smallest: int) -> int:
        """Return the smallest peak of the rank, in bytes, of plans found whose recomputation takes at most `CHEAP`
        (5 %) of the time of the rank's stages without recomputation.

        ``smallest``: bytes. `LIMITS.cheaper` budgets above it are tried. Together they take about as long as `run` may.
        """
        allowed = CHEAP * math.fsum(stage.graph.base_cost for stage in self.stages)

        def peak() -> int:
            return self._peak(self._choose(lambda c: (max(0.0, _extra(c) - allowed), self._peak(c))))

        low, high = smallest, peak()
        for _ in range(LIMITS.cheaper):
            other = self._with_budget((low + high) // 2)
            other.until = time.monotonic() + self.seconds / LIMITS.cheaper  # this search's own time is over
            other._search()
            low, high = (low, peak()) if peak() <= other.budget else (other.budget, high)
        return high

    def _with_budget(self, budget: int) -> RankSearch:
        """Return a search like this one for another budget, in bytes. Both have the same lists of candidates."""
        other = copy(self)
        other.budget = budget
        return other

    def _at(self, budget: int) -> int | None:
        """Search for plans within a budget of ``budget`` bytes, which may differ from that of the rank. Return the
        rank's peak with the plans found, in bytes; None if none fit. The search starts from all known plans, and its
        plans become candidates."""
        other = self._with_budget(budget)
        if other._best() is None:
            other._search()
        best = other._best()
        return None if best is None else other._peak(best)

    def _search(self) -> None:
        """Plan the stages with several limits of the bytes that they keep between forward and backward. Plans found
        become candidates.

        First, limits at equal distances are tried. Between each two neighbouring limits is an interval with a lower
        bound of the microseconds of recomputation. The interval with the least lower bound is halved, and the limit in
        its middle is tried; this is repeated. The search ends when no interval that can still be halved has a lower
        bound below the recomputation of the best plans, after `LIMITS.refined` intervals, or when time is over and
        plans fit.
        """
        most = self._share(self._least_room)
        shares = sorted({*(most * k / (LIMITS.grid - 1) for k in range(LIMITS.grid)), 1.0})
        guess = min(most, self._share(self._even_room))
        for share in (guess, *sorted(shares, key=lambda share: abs(share - guess))):
            self._try(share)
            if self._late and self._best() is not None:
                break
        shares = sorted({*shares, guess})
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

        Raises:
            InfeasibleBudget: the last search finds no plan.
        """
        stage, reusing = self.stages[at], {*self.stages[at].reusable}
        limited = replace(stage, graph=stage.bounded(room, *bounds))
        for searches_left in reversed(range(LIMITS.reuse if reusing else 1)):
            reusing = reusing if searches_left else set()
            graph = stage.assuming_reuse(reusing).bounded(room + stage.most_reused, *bounds)
            try:
                plan = self.planner.within(graph, room + stage.most_reused, self._starts(at, graph))
            except InfeasibleBudget:
                if searches_left:
                    continue
                raise
            self._take(at, plan)
            resident = zip(plan.schedule, limited.resident(plan.schedule), strict=True)
            exceeding = {step.op for step, bytes_ in resident if isinstance(step, Run) and bytes_ > room}
            if not exceeding:
                return
            reusing -= exceeding

    def _take(self, at: int, plan: Plan) -> None:
        """Add a plan to the candidates of stage number ``at`` of the rank, measured for the stage's original problem.

        The plan may be of a variant of the problem with other workspaces. It is ignored if it keeps more bytes than
        allowed, or if a candidate has the same memory and times.
        """
        stage = self.stages[at]
        own = replace(plan, estimate=simulate(stage.graph, plan.schedule))
        figures, found = stage.measured(own), self.found[at]
        if figures.kept_bytes <= self.kept[at] and all(figures != c.figures for c in found):
            found.append(_Candidate(own, figures))

    def _starts(self, at: int, graph: TrainingGraph) -> list[Plan]:
        return [replace(c.plan, estimate=simulate(graph, c.plan.schedule)) for c in self.found[at]]

    def _best(self) -> _Chosen | None:
        """Return the cheapest combination of one candidate plan for each stage with which the rank stays within its
        budget; None if there is none."""
        chosen = self._choose(lambda c: (max(0, self._peak(c) - self.budget), _extra(c), self._peak(c)))
        return chosen if self._peak(chosen) <= self.budget else None

    def _choose(self, key: Callable[[_Chosen], tuple[float, ...]]) -> _Chosen:
        """Return the combination of one candidate plan for each stage for which ``key`` returns the least value.

        If there are more combinations than `LIMITS.combinations`, a local search finds the result: no exchange of a
        single stage's plan improves it.
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
        """Return a lower bound of the microseconds of recomputation for one micro-batch, in all stages of the rank
        together."""
        by_stage = zip(*self.intervals.values(), strict=True)
        return math.fsum(min(floors) for floors in by_stage)

    def _floors(self, low: float, high: float) -> tuple[float, ...]:
        """Return, for each stage, a lower bound of the microseconds that it recomputes for a micro-batch, if the bytes
        that it keeps between forward and backward are between two limits. The other stages are assumed to keep as few
        bytes as possible. A lower bound is infinite if it is proven that no plan fits the budget, and 0 if the time of
        the search is over.

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
            elif self._late:
                floors.append(0.0)
            else:
                room += stage.most_reused
                overhead = self.planner.floor(stage.reusing.bounded(room, kept), room)
                floors.append(max(0.0, overhead) * stage.graph.base_cost)
        return tuple(floors)


def _extra(chosen: _Chosen) -> float:
    return math.fsum(c.figures.extra for c in chosen)


def _least_bytes(stage: StageProblem) -> int:
    """Return a lower bound of the bytes that any plan of a stage needs for one micro-batch, inputs included."""
    return min_peak_bound(stage.reusing.graph).bytes - stage.most_reused
