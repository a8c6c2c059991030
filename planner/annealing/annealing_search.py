"""The rounds of a search by simulated annealing: hot ones from the order without recomputation, reheated ones
from the best sequence.

As long as no plan fits, all are hot, and start from the caller's starts too.
"""

from __future__ import annotations

import math
import os
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

HELD = 100.0
"""The first price of bytes over the budget, if the best sequence is reheated. A mean tensor over the budget at one run
costs as much as so many mean runs. The price falls by itself while sequences fit.

From a low price, a sequence that runs its ops many times leaves the budget for good: at 1.01 times its smallest peak,
ResNet-50 stays at an overhead of 437 %. From the price here it gets to about 170 % in a second.
"""
DEAR = 0.5
"""If the best start has more than this overhead, it is annealed before the rounds, which are too short for sequences
that run ops many times."""
DEAR_LENGTH = 6.0
"""The length of the annealing of such a start, in shortest rounds; at most half of the effort."""
DEAR_HEAT = 0.3, 2.0
"""The first temperature of this annealing, in percent of the base cost: the second number for the full length, in
proportion less for a shorter one, but at least the first number. With 400,000 moves, GoogLeNet's plan of 1.1 times its
smallest peak gets to 61 %; from 0.3 it gets to 85 %."""


@dataclass
class Search:
    """A search by simulated annealing for the cheapest plan of ``graph`` within ``budget`` bytes."""

    graph: TrainingGraph
    budget: int
    seed: int = 0
    keep_order: bool = False
    """Whether first runs keep the problem's order."""
    enough: Callable[[float], bool] = lambda _: False
    """Takes the best overhead, infinite if no plan fits yet, and returns whether the search may end."""
    report: Callable[[float, float | None], None] = lambda _fraction, _overhead: None
    """Called often, with the share spent and the best overhead, or None if no plan fits yet."""
    suggest: Callable[[], Sequence[str]] = tuple
    """A function that returns a sequence of op names to start from, perhaps over the budget, or an empty one. It is
    called before each round that can use it."""
    suggested_to: tuple[int, ...] = (1, 3)
    """The rounds k, by k mod 4, that start from the sequence that ``suggest`` returns. Odd (reheated) rounds anneal
    it for a first part of their length, even ones for all of it."""
    best: Plan | None = None
    """The cheapest plan within the budget so far."""
    smallest: Plan | None = None
    """The plan with the smallest peak so far."""
    twin: Search | None = None
    """The search of a second thread with another seed, or None."""
    reached: dict[bool, float] = field(default_factory=lambda: dict.fromkeys((True, False), math.inf))
    """The least overhead at the end of a hot round. Key True: of rounds that looked for an order of the ops first; key
    False: of others. Infinite if none of these rounds ended within the budget."""
    ended_early: bool = False
    """Whether the search gave up before its effort was spent, because too many rounds in a row improved nothing."""
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
        """The least overhead within the budget so far, of both threads; infinite if there is none. Any thread
        may read it.
        """
        best = self.best
        own = math.inf if best is None else best.estimate.overhead
        return own if self.twin is None else min(own, self.twin.overhead)

    def run(self, starts: Sequence[Sequence[str]], effort: Effort) -> Plan | None:
        """Return the cheapest plan within the budget that is found, or None. A `KeyboardInterrupt` or `Enough` ends the
        search and is recorded in ``effort.interrupted``; if no plan fits yet, it is raised again."""
        self.prepare(starts)
        begun = self.best  # already tidied; to do it again takes seconds if each op runs many times
        try:
            if self._wants_twin(effort):
                self._rounds_in_two(starts, effort)
            else:
                self._rounds(effort)
        except INTERRUPTS as interrupt:
            if self.best is None:
                raise
            effort.interrupt(interrupt)
        if self.best is not None and self.best is not begun:
            self._offer(self.annealer.tidied(runs_of(self.best.schedule), self.budget))
        return self.best

    def prepare(self, starts: Sequence[Sequence[str]]) -> None:
        """Make the annealer, simulate and tidy the order without recomputation and ``starts``, and record the best
        plans. Starts that `Annealer.accepts` refuses are ignored."""
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
    def _held(self) -> float:
        """The first price of a byte over the budget if the best sequence is annealed again: a mean tensor costs `HELD`
        mean runs."""
        return HELD * self.annealer.mean_cost / self.annealer.mean_size

    @property
    def schedule(self) -> CoolingSchedule:
        """The constants of the search: `WITH_PHASES` for problems with phases (training steps) or if ``keep_order``
        is set, else `WITHOUT_PHASES`."""
        return WITH_PHASES if self.graph.has_phases or self.keep_order else WITHOUT_PHASES

    def _wants_twin(self, effort: Effort) -> bool:
        """Return whether to search in a second thread, too: large problems without phases on several CPUs,
        unless moves are counted.
        """
        schedule = self.schedule
        large = schedule.reorders and len(self.base) >= schedule.two_threads
        # With counted moves, the result must not depend on the number of CPUs.
        return large and not effort.moves and (os.cpu_count() or 1) > 1

    def _rounds_in_two(self, starts: Sequence[Sequence[str]], effort: Effort) -> None:
        """Search in this thread and, with another seed, in a second one, and record the best plans of both."""
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
        """Anneal the best plan first if it is dear (`DEAR`), then run rounds until ``patience`` of them in a row
        improve nothing. They end earlier if the overhead is `enough` or the effort is spent."""
        schedule = self.schedule
        shortest = effort.shortest_round(len(self.base), schedule.shortest)
        if self.best is not None and self.best.estimate.overhead > DEAR:
            self.annealer.load(runs_of(self.best.schedule), self.budget, self._held)
            length = min(effort.left / 2, DEAR_LENGTH * shortest)
            heat = max(DEAR_HEAT[0], DEAR_HEAT[1] * length / (DEAR_LENGTH * shortest)), schedule.last_heat
            self._stage(ALL_MOVES, heat, length, effort, self._set_price)
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
        """Run round ``k`` for ``length`` seconds or moves: hot if ``k`` is even or no plan fits, else reheated.
        Descents may follow. A sequence that ``suggest`` returns is annealed first, or instead if ``k`` is even."""
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
            annealer.load(runs_of(self.best.schedule), self.budget, self._held)
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
        """Anneal the loaded sequence in round ``k`` for ``length`` seconds or moves, from temperature ``hot`` (percent
        of the base cost). First change its order if `CoolingSchedule.looks_for_order`, and raise the price slowly if
        `CoolingSchedule.is_gentle`. Update ``reached``."""
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
        """Anneal the loaded best sequence in round ``k`` for ``length`` seconds or moves, from a share of the
        temperature ``hot``. Without phases, every other reheated round first changes the sequence's order, then begins
        at ``hot``."""
        schedule = self.schedule
        shaken = schedule.reorders and k % 4 == 1
        if shaken:
            self._reorder(schedule.shake, schedule.shake_budget, length, effort)
            length *= 1 - schedule.shake.share
        heat = (hot if shaken else schedule.reheat * hot, schedule.last_heat)
        price = partial(self._set_price, low=schedule.shaken_price) if shaken else self._set_price
        self._stage(ALL_MOVES, heat, length, effort, price)

    def _raise_price_slowly(self, hot: float, length: float, effort: Effort) -> float:
        """Raise the price of bytes over the budget slowly at the temperature ``hot``, until the sequence fits or a
        share of ``length`` (seconds or moves) is over. Record a better plan, and return the seconds or moves spent."""
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
        """Change only the order of the current runs, for a budget of ``share`` times the search's, which then applies
        again. This takes ``ordering.share`` of ``length`` (seconds or moves)."""
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
        """Anneal the current sequence for up to ``length`` (seconds or moves), from the first temperature of ``heat``
        to the second, and record better plans. It ends early once `_satisfied` or ``effort`` is cut short. ``mode``: as
        in `Annealer.cool`. ``set_price``: called often with the share of the stage that is done."""
        began = effort.spent()
        hot, cold = heat
        # Once the budget has ended, `spent` stays the same, and less than `length` if earlier stages took too long.
        while (spent := effort.spent() - began) < length and not (effort.cut_short or self._satisfied()):
            moves = effort.next_slice(length - spent)
            share = spent / length
            end = min(1.0, share + (moves if effort.moves else SLICE) / length)
            set_price(share)
            heats = hot * (cold / hot) ** share, hot * (cold / hot) ** end
            self.annealer.cool_slice(effort, moves, *heats, mode)
            self._take(self.annealer)
            self._report(effort)

    def _set_price(self, share: float, low: float | None = None) -> None:
        """Set the price of bytes over the budget when ``share`` of a stage is done. With phases, or near the stage's
        end, the annealer adapts it itself. ``low``: the price at the beginning; None: the schedule's."""
        schedule = self.schedule
        if not schedule.reorders or share >= schedule.priced_share:
            self.annealer.limit_price(math.inf)
            return
        first, last = schedule.prices if low is None else (low, schedule.prices[1])
        unit = self.annealer.mean_cost / self.annealer.mean_size
        self.annealer.set_price(unit * first * math.pow(last / first, share / schedule.priced_share))

    def descend(self, effort: Effort, until: float, from_base: bool = False, enough: int = 0) -> None:
        """Lower the peak of the leanest plan, or with ``from_base`` of the order without recomputation, step by step.
        End within the budget or ``enough`` bytes, or when ``effort.spent()`` reaches ``until``. Plans found are
        recorded."""
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
        """Return the plan of a sequence. It is recorded if it is the cheapest that fits, or has the smallest peak."""
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
