"""The rounds of a search by simulated annealing.

A hot round starts from the order without recomputation at a high temperature. A reheated round starts from the best
sequence so far at a lower one. As long as no plan fits the budget, all rounds are hot. They start from that order and
from the starts that the caller gave, one after the other. Temperatures and lengths are in `cooling_schedule`.
"""

from __future__ import annotations

import math
import os
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from functools import partial

from rematplan.ir import TrainingGraph
from rematplan.planner.annealing.annealer import ALL_MOVES, SHIFTS_ONLY, UNTIL_FEASIBLE, Annealer
from rematplan.planner.annealing.cooling_schedule import (
    WITH_PHASES,
    WITHOUT_PHASES,
    CoolingSchedule,
    Ordering,
)
from rematplan.planner.annealing.descents import DESCENTS, Descent
from rematplan.planner.arrays.precedence import needed_ops
from rematplan.planner.core.effort import SLICE, Effort
from rematplan.planner.core.plan import Plan, plan_from_runs
from rematplan.planner.core.schedule import runs_of
from rematplan.planner.core.strategy import INTERRUPTS


@dataclass
class Search:
    """A search by simulated annealing for the cheapest plan of the problem ``graph`` within ``budget`` bytes.

    ``seed``: the seed of the random moves. ``keep_order``: whether the first executions of all ops keep the problem's
    order. ``enough``: a function that is given an overhead and returns whether the search may end with it. Infinity
    means that no plan fits yet. ``report``: a function that is called often, with the share of the effort that is
    spent and the best overhead so far, or None if no plan fits yet. ``best``: the cheapest plan within the budget so
    far, or None. ``smallest``: the plan with the smallest peak so far, or None. ``twin``: the search of a second
    thread with another seed, or None.
    """

    graph: TrainingGraph
    budget: int
    seed: int = 0
    keep_order: bool = False
    enough: Callable[[float], bool] = lambda _: False
    report: Callable[[float, float | None], None] = lambda _fraction, _overhead: None
    suggest: Callable[[], Sequence[str]] = tuple
    """A function that returns a sequence of op names to start from, perhaps over the budget, or an empty one. It is
    called before each round that can use it."""
    suggested_to: tuple[int, ...] = (1, 3)
    """The rounds k, by k mod 4, that start from the sequence that ``suggest`` returns. Odd (reheated) rounds anneal
    it for a first part of their length, even ones for all of it."""
    best: Plan | None = None
    smallest: Plan | None = None
    twin: Search | None = None
    reached: dict[bool, float] = field(default_factory=lambda: dict.fromkeys((True, False), math.inf))
    """The least overhead at the end of a hot round, for rounds that looked for an order of the ops first (key True)
    and for those that did not (key False). Infinite if none of these rounds ended within the budget."""
    ended_early: bool = False
    """Whether the search gave up before its effort was spent, because too many rounds in a row improved nothing."""
    interrupted: bool = False
    """Whether a `KeyboardInterrupt` or `Enough` ended the search, so that `run` returned the best plan so far."""
    annealer: Annealer = field(init=False)
    """The annealer of this search. The method `prepare` sets this attribute and the next three."""
    base: list[str] = field(init=False)
    """The order without recomputation, as op names."""
    starts: list[list[str]] = field(init=False)
    """Sequences of op names to start from, ``base`` first."""
    base_fits: bool = field(init=False)
    """Whether the peak of ``base`` is within the budget."""

    @property
    def overhead(self) -> float:
        """The overhead of the best plan within the budget so far, found by this thread or the second one. Infinite if
        there is none. Other threads may read it."""
        best = self.best
        own = math.inf if best is None else best.estimate.overhead
        return own if self.twin is None else min(own, self.twin.overhead)

    def run(self, starts: Sequence[Sequence[str]], effort: Effort) -> Plan | None:
        """Return the cheapest plan within the budget that the search finds, ``starts`` included, or None.

        A `KeyboardInterrupt` or `Enough` ends the search. Then the best plan so far is returned and ``interrupted``
        is set. If no plan fits yet, the exception is raised again.
        """
        self.prepare(starts)
        begun = self.best  # already tidied; to do it again takes seconds if each op runs many times
        try:
            if self._wants_twin(effort):
                self._rounds_in_two(starts, effort)
            else:
                self._rounds(effort)
        except INTERRUPTS:
            if self.best is None:
                raise
            self.interrupted = True
        if self.best is not None and self.best is not begun:
            self._offer(self.annealer.tidied(runs_of(self.best.schedule), self.budget))
        return self.best

    def prepare(self, starts: Sequence[Sequence[str]]) -> None:
        """Simulate the order without recomputation and ``starts`` (sequences of op names). Remove recomputations that
        the budget, or the sequence's own peak if that is larger, does not need. Record the best plans. Starts that
        are invalid or break a required order are ignored."""
        self.annealer = Annealer(self.graph, self.seed, self.keep_order)
        self.base = [op.name for op in needed_ops(self.graph)]
        self.starts = [self.base]
        for runs in map(list, starts):
            if runs not in self.starts and self.annealer.accepts(runs):
                self.starts.append(runs)
        peaks = [self._offer(runs).estimate.peak for runs in self.starts]
        self.base_fits = peaks[0] <= self.budget
        for runs, peak in zip(self.starts, peaks, strict=True):
            self._offer(self.annealer.tidied(runs, max(peak, self.budget)))

    @property
    def least(self) -> Plan:
        """The plan with the smallest peak so far, whether or not it fits the budget. Available after `prepare`."""
        assert self.smallest is not None
        return self.smallest

    @property
    def schedule(self) -> CoolingSchedule:
        """The constants of the search: `WITH_PHASES` for problems with phases (training steps) or if ``keep_order``
        is set, else `WITHOUT_PHASES`."""
        return WITH_PHASES if self.graph.has_phases or self.keep_order else WITHOUT_PHASES

    def _wants_twin(self, effort: Effort) -> bool:
        """Return whether to search in a second thread, too: for large problems without phases, if there is more than
        one CPU. Not if moves are counted, because the result would then depend on the number of CPUs."""
        schedule = self.schedule
        large = schedule.reorders and len(self.base) >= schedule.two_threads
        return large and not effort.moves and (os.cpu_count() or 1) > 1

    def _rounds_in_two(self, starts: Sequence[Sequence[str]], effort: Effort) -> None:
        """Search in this thread and, with another seed, in a second one. Then add the best plans of the second thread
        to those of this one. ``starts``: sequences of op names for the second thread to start from."""
        self.twin = twin = Search(self.graph, self.budget, self.seed + 1, enough=lambda _: self._satisfied())
        other = Effort(effort.left)

        def search() -> None:
            other.begin()
            twin.prepare(starts)
            twin._rounds(other)

        with ThreadPoolExecutor(1) as pool:
            work = pool.submit(search)
            try:
                self._rounds(effort)
            finally:
                other.stop()
                work.result()
                for plan in (twin.smallest, twin.best):
                    if plan is not None:
                        self._offer(runs_of(plan.schedule))

    def _rounds(self, effort: Effort) -> None:
        schedule = self.schedule
        shortest = effort.shortest_round(len(self.base), schedule.shortest)
        k = stale = 0
        while stale < schedule.patience and not self._satisfied() and not effort.over:
            left = effort.left
            length = shortest * schedule.length(k, self.best is not None)
            before = self.best
            self._round(k, left if 2 * length > left else length, effort)
            stale = stale + 1 if self.best is before else 0
            k += 1
        self.ended_early = stale >= schedule.patience

    def _round(self, k: int, length: float, effort: Effort) -> None:
        """Run annealing round ``k``: hot if ``k`` is even or no plan fits yet, else reheated. ``length``: seconds or
        moves, taken from ``effort``.

        A hot round starts from the order without recomputation, or from one of the starts as long as no plan fits. If
        ``suggest`` returns a sequence for this round, that is annealed first, or instead if ``k`` is even. If no plan
        fits afterwards, or nothing better was found, descents may follow, which lower the peak step by step.
        """
        annealer, before, schedule = self.annealer, self.best, self.schedule
        hot = schedule.hot(len(self.base))
        if near := self._suggested(k):
            share = schedule.suggested_share if k % 2 else 1.0
            annealer.load(near, self.budget)
            heat = schedule.suggested_heat * hot, schedule.last_heat
            self._stage(ALL_MOVES, heat, share * length, effort, self._set_price)
            if not k % 2:
                return
            length *= 1 - share
        if k % 2 and self.best is not None:
            annealer.load(runs_of(self.best.schedule), self.budget)
            self._reheat(k, hot, length, effort)
        else:
            annealer.load(self.starts[k % len(self.starts)] if self.best is None else self.base, self.budget)
            self._cool_from_start(k, hot, length, effort)
        if self.best is None:
            self._offer(annealer.current())
            self.descend(effort, min(effort.total, effort.spent() + length))
        elif self.best is before and not self.base_fits and self._descends(k):
            share = schedule.between if schedule.reorders else 1.0
            until = min(effort.total, effort.spent() + share * length)
            while effort.spent() < until and not self._satisfied():  # each ends in another local minimum
                self.descend(effort, until, from_base=True)

    def _cool_from_start(self, k: int, hot: float, length: float, effort: Effort) -> None:
        """Anneal the loaded sequence from ``hot``, the initial temperature of a hot round. ``length``: seconds or
        moves, taken from ``effort``.

        Depending on the round number ``k``, the order of the sequence is improved first, or the price of bytes over
        the budget rises slowly first.
        """
        schedule = self.schedule
        orders = schedule.looks_for_order(k, self.reached[True], self.reached[False])
        if orders:
            self._reorder(schedule.ordering, schedule.order_budget(k), length, effort)
            length *= 1 - schedule.ordering.share
        if schedule.is_gentle(k, self.best is not None):
            length -= self._raise_price_slowly(hot, length, effort)
        self._stage(ALL_MOVES, (hot, schedule.last_heat), length, effort, self._set_price)
        ended = self.annealer.best_overhead if self.annealer.feasible else math.inf
        self.reached[orders] = min(self.reached[orders], ended)

    def _reheat(self, k: int, hot: float, length: float, effort: Effort) -> None:
        """Anneal the best sequence so far, which is loaded. The initial temperature is a share of ``hot``. In
        problems without phases, every other reheated round first changes the order and then begins at ``hot``.
        ``length``: seconds or moves, taken from ``effort``."""
        schedule = self.schedule
        shaken = schedule.reorders and k % 4 == 1
        if shaken:
            self._reorder(schedule.shake, schedule.shake_budget, length, effort)
            length *= 1 - schedule.shake.share
        heat = (hot if shaken else schedule.reheat * hot, schedule.last_heat)
        price = partial(self._set_price, low=schedule.shaken_price) if shaken else self._set_price
        self._stage(ALL_MOVES, heat, length, effort, price)

    def _raise_price_slowly(self, hot: float, length: float, effort: Effort) -> float:
        """Raise the price of bytes over the budget slowly at the constant temperature ``hot``, until the sequence
        fits or a share of the round is over. Return the seconds or moves spent. ``length``: the length of the round
        in seconds or moves."""
        annealer, schedule = self.annealer, self.schedule
        began, rising = effort.spent(), schedule.rising_share * length
        until = began + rising
        annealer.limit_growth(math.pow(schedule.rising_factor, 1 / max(1.0, rising * effort.rate)))
        while effort.spent() < until and not (annealer.feasible or effort.cut_short or self._satisfied()):
            most = max(1, int((until - effort.spent()) * effort.rate))
            # These are too few moves to measure their speed by `effort.made`.
            effort.charge(moves=annealer.cool(min(most, effort.slice_), hot, hot, UNTIL_FEASIBLE))
            self._report(effort)
        annealer.limit_growth(math.inf)
        self._take(annealer)
        return effort.spent() - began

    def _descends(self, k: int) -> bool:
        """Return whether descents (searches that lower the peak step by step) follow round ``k`` if it found nothing
        better."""
        return k % 2 == 0 if self.schedule.reorders else k % 8 == DESCENTS.round_of_eight

    def _suggested(self, k: int) -> Sequence[str]:
        """Return the sequence of op names that ``suggest`` returns, if round ``k`` can start from it; else an empty
        sequence."""
        near = () if self.schedule.reorders or k % 4 not in self.suggested_to else self.suggest()
        return near if near and self.annealer.accepts(near) else ()

    def _reorder(self, ordering: Ordering, share: float, length: float, effort: Effort) -> None:
        """Change only the order of the current runs, by annealing, so that few bytes exceed the budget times
        ``share``. The stage takes ``ordering.share`` of ``length`` (seconds or moves)."""
        annealer, price = self.annealer, 1.0 / self.annealer.mean_size
        annealer.load(annealer.current(), int(share * self.budget), price)
        moves = ordering.share * length
        self._stage(SHIFTS_ONLY, ordering.heat, moves, effort, lambda _share: annealer.limit_price(price))
        annealer.load(annealer.current(), self.budget)

    def _stage(
        self,
        mode: int,
        heat: tuple[float, float],
        length: float,
        effort: Effort,
        set_price: Callable[[float], None],
    ) -> None:
        """Anneal the current sequence for ``length`` seconds or moves with moves of one kind, and record better
        plans.

        ``mode``: the kinds of moves (see `Annealer.cool`). ``heat``: the initial and the final temperature.
        ``set_price``: a function that sets the price of bytes over the budget; it is called often with the share of
        the stage that is done.
        """
        began = effort.spent()
        hot, cold = heat
        # Once the budget has ended, `spent` stays the same, and less than `length` if earlier stages took too long.
        while (spent := effort.spent() - began) < length and not (effort.cut_short or self._satisfied()):
            moves = effort.next_slice(length - spent)
            share = spent / length
            end = min(1.0, share + (moves if effort.moves else SLICE) / length)
            clock = time.thread_time()
            set_price(share)
            moves = self.annealer.cool(moves, hot * (cold / hot) ** share, hot * (cold / hot) ** end, mode)
            effort.made(moves, time.thread_time() - clock)
            self._take(self.annealer)
            self._report(effort)

    def _set_price(self, share: float, low: float | None = None) -> None:
        """Set the price of bytes over the budget, when ``share`` of a stage is done. With phases, and near the end of
        a stage, the annealer adapts the price itself without a limit. Otherwise the price rises geometrically with
        ``share``.

        ``low``: the price at the beginning of the stage. None means the schedule's.
        """
        schedule = self.schedule
        if not schedule.reorders or share >= schedule.priced_share:
            self.annealer.limit_price(math.inf)
            return
        first, last = schedule.prices if low is None else (low, schedule.prices[1])
        unit = self.annealer.mean_cost / self.annealer.mean_size
        self.annealer.set_price(unit * first * math.pow(last / first, share / schedule.priced_share))

    def descend(self, effort: Effort, until: float, from_base: bool = False, enough: int = 0) -> None:
        """Lower the peak of a plan step by step (see `Descent.run`), and record the plans found."""
        start = self._offer(self.base) if from_base else self.least
        inputs = self.graph.input_bytes
        descent = Descent(self.annealer, self.budget, len(self.base), inputs, self._offer, self._report)
        descent.run(start, effort, until, enough)

    def _take(self, annealer: Annealer) -> None:
        if annealer.feasible and (
            self.best is None or annealer.best_overhead < self.best.estimate.overhead - 1e-12
        ):
            self._offer(annealer.best())

    def _offer(self, runs: Sequence[str]) -> Plan:
        """Simulate a sequence of op names and return its plan. The plan is recorded if it is the cheapest that fits
        so far, or has the smallest peak so far."""
        plan = plan_from_runs(self.graph, runs, "anneal", budget=self.budget)
        if self.smallest is None or plan.estimate.peak < self.smallest.estimate.peak:
            self.smallest = plan
        fits = plan.estimate.peak <= self.budget
        if fits and (self.best is None or plan.estimate.cost < self.best.estimate.cost):
            self.best = plan
        return plan

    def _report(self, effort: Effort) -> None:
        overhead = self.overhead
        self.report(effort.share_spent, overhead if math.isfinite(overhead) else None)

    def _satisfied(self) -> bool:
        return self.enough(self.overhead)
