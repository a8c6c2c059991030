"""The rounds of the annealing: cooling, restarts from the base order, and reheating of the best sequence so far.

A hot round starts from the base order, a reheated one from the best sequence so far. As long as nothing feasible is
known, hot rounds also start from the given starts. Temperatures and lengths are in `cooling_schedule`.
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
from rematplan.planner.annealing.search_budget import SLICE, SearchBudget
from rematplan.planner.arrays.precedence import needed_ops
from rematplan.planner.core.plan import Plan, plan_from_runs
from rematplan.planner.core.schedule import runs_of
from rematplan.planner.core.strategy import INTERRUPTS


@dataclass
class Search:
    """One search by annealing for the cheapest plan of the problem ``graph`` within ``budget`` bytes.

    ``seed``: of the random moves. ``keep_order``: whether the first runs of all ops keep the problem's order.
    ``enough(overhead)``: returns whether a plan with this overhead needs no improvement; for infinity, whether it is
    known that no plan fits. ``report(fraction, overhead)``: called often with the share of the time that is spent
    and the best overhead so far, None if nothing fits yet. ``best``: the cheapest plan within the budget so far, or
    None. ``smallest``: the plan with the smallest peak so far, or None. ``twin``: the search of a second thread with
    another seed, if there is one.
    """

    graph: TrainingGraph
    budget: int
    seed: int = 0
    keep_order: bool = False
    enough: Callable[[float], bool] = lambda _: False
    report: Callable[[float, float | None], None] = lambda _fraction, _overhead: None
    suggest: Callable[[], Sequence[str]] = tuple
    """Returns a sequence of runs to start from, perhaps over the budget, or an empty one; called before each round
    that uses it."""
    suggested_to: tuple[int, ...] = (1, 3)
    """The rounds, as numbers modulo 4, that start from the suggested sequence. Odd rounds, which are reheated, do so
    for a first part; even ones entirely."""
    best: Plan | None = None
    smallest: Plan | None = None
    twin: Search | None = None
    reached: dict[bool, float] = field(default_factory=lambda: dict.fromkeys((True, False), math.inf))
    """The least overhead at the end of a hot round that looked for an order first (key True), and of one that did
    not (False); infinite if none ended within the budget."""
    ended_early: bool = False
    """Whether the search gave up before its time was spent."""
    interrupted: bool = False
    """Whether a `KeyboardInterrupt` ended the search, so that `run` returned the best plan so far."""

    @property
    def overhead(self) -> float:
        """The overhead of the best plan so far, that of the second thread included; infinite if there is none. May
        be read from another thread."""
        best = self.best
        own = math.inf if best is None else best.estimate.overhead
        return own if self.twin is None else min(own, self.twin.overhead)

    def run(self, starts: Sequence[Sequence[str]], effort: SearchBudget) -> Plan | None:
        """Return the cheapest plan within the budget that is found, starts included; None if none is found.

        A `KeyboardInterrupt` or `Enough` ends the search: the best plan so far is returned, and ``interrupted`` is
        set. If nothing fits yet, the exception is raised again.

        Args:
            starts: sequences of runs (names) to start from. Sequences that are invalid or break a required order are
                ignored.
            effort: the time or number of moves that the search may spend.
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
        """Simulate the order without recomputation and ``starts`` (sequences of runs), remove runs that the budget
        does not need, and keep the best plans. Starts that are invalid or break a required order are left out."""
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
        """The plan with the smallest peak so far, whether or not it fits the budget. There is none before `prepare`
        is called."""
        assert self.smallest is not None
        return self.smallest

    @property
    def schedule(self) -> CoolingSchedule:
        """The constants of the search: `WITH_PHASES` for problems with phases or if ``keep_order`` is set, else
        `WITHOUT_PHASES`."""
        return WITH_PHASES if self.graph.has_phases or self.keep_order else WITHOUT_PHASES

    def _wants_twin(self, effort: SearchBudget) -> bool:
        """Return whether to use a second thread; not if moves are counted, because the result would depend on the
        number of cores."""
        schedule = self.schedule
        large = schedule.reorders and len(self.base) >= schedule.two_threads
        return large and not effort.moves and (os.cpu_count() or 1) > 1

    def _rounds_in_two(self, starts: Sequence[Sequence[str]], effort: SearchBudget) -> None:
        """Search in this thread and, with another seed, in a second one, and take over its plans."""
        self.twin = twin = Search(self.graph, self.budget, self.seed + 1, enough=lambda _: self._satisfied())
        other = SearchBudget(effort.total - effort.spent())

        def search() -> None:
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

    def _rounds(self, effort: SearchBudget) -> None:
        schedule = self.schedule
        shortest = effort.shortest_round(len(self.base), schedule.shortest)
        k = stale = 0
        while stale < schedule.patience and not self._satisfied() and effort.spent() < effort.total:
            left = effort.total - effort.spent()
            length = shortest * schedule.length(k, self.best is not None)
            before = self.best
            self._round(k, left if 2 * length > left else length, effort)
            stale = stale + 1 if self.best is before else 0
            k += 1
        self.ended_early = stale >= schedule.patience

    def _round(self, k: int, length: float, effort: SearchBudget) -> None:
        """Run a round: hot and reheated alternately. Without a feasible plan, hot rounds from the order without
        recomputation and the starts."""
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

    def _cool_from_start(self, k: int, hot: float, length: float, effort: SearchBudget) -> None:
        """Cool the loaded sequence from a hot round's temperature.

        Depending on the round, its order is improved first, or the price rises slowly first.
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

    def _reheat(self, k: int, hot: float, length: float, effort: SearchBudget) -> None:
        """Cool the best sequence so far, which is loaded: reheated, or after shaking its order."""
        schedule = self.schedule
        shaken = schedule.reorders and k % 4 == 1
        if shaken:
            self._reorder(schedule.shake, schedule.shake_budget, length, effort)
            length *= 1 - schedule.shake.share
        heat = (hot if shaken else schedule.reheat * hot, schedule.last_heat)
        price = partial(self._set_price, low=schedule.shaken_price) if shaken else self._set_price
        self._stage(ALL_MOVES, heat, length, effort, price)

    def _raise_price_slowly(self, hot: float, length: float, effort: SearchBudget) -> float:
        """Raise the price of bytes over the budget slowly, at a round's first temperature, until something fits or a
        share of the round is over. Return the seconds or moves spent."""
        annealer, schedule = self.annealer, self.schedule
        began, rising = effort.spent(), schedule.rising_share * length
        until = began + rising
        annealer.limit_growth(math.pow(schedule.rising_factor, 1 / max(1.0, rising * effort.rate)))
        while effort.spent() < until and not annealer.feasible and not self._satisfied():
            most = max(1, int((until - effort.spent()) * effort.rate))
            effort.done += annealer.cool(
                min(most, effort.slice_), hot, hot, UNTIL_FEASIBLE
            )  # too few for `made`
            self._report(effort)
        annealer.limit_growth(math.inf)
        self._take(annealer)
        return effort.spent() - began

    def _descends(self, k: int) -> bool:
        """Return whether descents follow a round that found nothing better."""
        return k % 2 == 0 if self.schedule.reorders else k % 8 == DESCENTS.round_of_eight

    def _suggested(self, k: int) -> Sequence[str]:
        """Return the current suggestion, if the round can use it; else an empty sequence."""
        near = () if self.schedule.reorders or k % 4 not in self.suggested_to else self.suggest()
        return near if near and self.annealer.accepts(near) else ()

    def _reorder(self, ordering: Ordering, share: float, length: float, effort: SearchBudget) -> None:
        """Look for an order of the current runs with few bytes over a share of the budget."""
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
        effort: SearchBudget,
        set_price: Callable[[float], None],
    ) -> None:
        """Cool the current sequence from one temperature to another with moves of one kind.

        ``set_price``: called before each slice with the share of the stage that is done.
        """
        began = effort.spent()
        hot, cold = heat
        while (spent := effort.spent() - began) < length and not self._satisfied():
            moves = effort.next_slice(length - spent)
            share = spent / length
            end = min(1.0, share + (moves if effort.moves else SLICE) / length)
            clock = time.monotonic()
            set_price(share)
            moves = self.annealer.cool(moves, hot * (cold / hot) ** share, hot * (cold / hot) ** end, mode)
            effort.made(moves, time.monotonic() - clock)
            self._take(self.annealer)
            self._report(effort)

    def _set_price(self, share: float, low: float | None = None) -> None:
        """Set the price of a byte over the budget, when a share of a stage of all moves is done. ``low``: the first
        price without phases; by default the schedule's."""
        schedule = self.schedule
        if not schedule.reorders or share >= schedule.priced_share:
            self.annealer.limit_price(math.inf)
            return
        first, last = schedule.prices if low is None else (low, schedule.prices[1])
        unit = self.annealer.mean_cost / self.annealer.mean_size
        self.annealer.set_price(unit * first * math.pow(last / first, share / schedule.priced_share))

    def descend(self, effort: SearchBudget, until: float, from_base: bool = False) -> None:
        """Lower the smallest peak step by step; see `Descent.run`.

        Args:
            effort: the time or number of moves that the search may spend.
            until: how much of ``effort`` may be spent when the descent ends: seconds or moves.
            from_base: whether to start from the plan without recomputation; if not, from the plan with the smallest
                peak so far.
        """
        start = self._offer(self.base) if from_base else self.least
        inputs = self.graph.input_bytes
        descent = Descent(self.annealer, self.budget, len(self.base), inputs, self._offer, self._report)
        descent.run(start, effort, until)

    def _take(self, annealer: Annealer) -> None:
        if annealer.feasible and (
            self.best is None or annealer.best_overhead < self.best.estimate.overhead - 1e-12
        ):
            self._offer(annealer.best())

    def _offer(self, runs: Sequence[str]) -> Plan:
        """Simulate a sequence of runs, record its plan if it is the cheapest that fits or has the smallest peak, and
        return the plan."""
        plan = plan_from_runs(self.graph, runs, "anneal", budget=self.budget)
        if self.smallest is None or plan.estimate.peak < self.smallest.estimate.peak:
            self.smallest = plan
        fits = plan.estimate.peak <= self.budget
        if fits and (self.best is None or plan.estimate.cost < self.best.estimate.cost):
            self.best = plan
        return plan

    def _report(self, effort: SearchBudget) -> None:
        overhead = self.overhead
        self.report(min(1.0, effort.spent() / effort.total), overhead if math.isfinite(overhead) else None)

    def _satisfied(self) -> bool:
        return self.enough(self.overhead)
