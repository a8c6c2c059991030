"""How the annealer's time is divided: rounds of cooling, alternately hot and reheated.

A hot round starts from the base order, a reheated one from the best sequence so far. As long as nothing feasible is
known, hot rounds also start from the given starts.

The local minimum in which a hot round ends is decided early and depends little on the round's length, so many short
rounds find a good one sooner than a few slow ones. The best length differs between problems. Lengths follow the
sequence of Luby, Sinclair and Zuckerman (1993), which gives each power of two about the same share of the time, and
loses at most a logarithm against the best length.

It is decided early because the price of bytes over the budget rises in the first few ten thousand moves of a round
of any length: it quenches. Once something fits, every other pair of rounds is gentle: the price rises slowly, at
the first temperature. Where memory is scarcest, this finds minima that a quench misses. Elsewhere many quenches are
as good; and as long as nothing fits, a slow rise achieves nothing within a few thousand moves.

In problems without phases, hot rounds look for an order first, or not, whichever has led further. A second thread
does the same with another seed. An order that saves bytes is found quickly but may prevent the best drops, most of
all where the problem is nearly a training step. Choosing which tensors to drop takes slow cooling: hot rounds grow
slowly, so that there are several, and the rounds between them are short. Reheating does not lead from one order to
another, so every other reheated round shakes the order first.
"""

from __future__ import annotations

import math
import os
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from functools import partial
from typing import NamedTuple

from rematplan.ir import TrainingGraph
from rematplan.planner.annealing.annealer import (
    ALL_MOVES,
    SHIFTS_ONLY,
    UNTIL_FEASIBLE,
    Annealer,
    compile_annealer,
)
from rematplan.planner.arrays.precedence import needed_ops
from rematplan.planner.core.plan import Plan, plan_from_runs
from rematplan.planner.core.schedule import runs_of

SLICE = 0.2  # seconds between two looks at the clock
MOVES_IN_SLICE = 4000  # at first, and always where moves are counted instead of seconds
COLD = 0.001  # percent of the base cost
REHEAT = 0.2  # of a hot round's temperature
SUGGESTED = 0.3  # of a hot round's temperature, for suggested sequences
BEFORE = 0.25  # share of a reheated round that is spent on the suggestion first


class Ordering(NamedTuple):
    """A stage that only reorders, in problems without phases.

    ``share``: its share of the round. ``heat``: first and last temperature, in tensors of mean size that are over
    the budget at one run. The price is constant meanwhile: if it rose as long as nothing fits, it would freeze the
    order.
    """

    share: float
    heat: tuple[float, float]


ORDERING = Ordering(0.4, (300.0, 1.0))
"""The ordering stage of hot rounds."""
LOOSE = 1.15
"""In every other pair of hot rounds, the order is sought for a budget this many times larger.

The order with the fewest bytes over the budget itself is nearly always the same, and need not be the one from which
dropping is cheapest.
"""
OTHERWISE = 4  # one of this many hot rounds uses the variant that has not led further
SHAKE, TIGHT, SHAKEN = Ordering(0.3, (100.0, 1.0)), 0.85, 0.5
"""Before every other reheated round the order is shaken: the stage, the share of the budget it reorders for, and
the first price after it.

What fits is reordered as if it had to fit into less, and what has become unnecessary is removed.
"""
PRICES, FREE = (0.1, 10.0), 0.9
"""The price of a tensor of mean size over the budget at one run, in runs of mean cost: at the beginning of a stage
without phases, and after the share `FREE` of it.

From then on the price rises as long as nothing fits. At small budgets nothing fits for long; a price that rose all
the time would freeze the current drops.
"""
PLAIN_HEAT, PLAIN_COLD = (0.1, 30.0), 0.003
"""Without phases: the least first temperature of a hot round; otherwise its product with the number of ops; and the
last temperature."""


SHORTEST = (75.0, 5000.0)
PLAIN_SHORTEST = (150.0, 1000.0)  # without phases
"""Moves per op in the shortest round, and the number of ops at which it is twice as many."""
MOVES_A_SECOND = 300_000
GENTLE = 4  # a gentle round, in which the price rises slowly, is this many times as long as a steep one
RISING, RANGE = 0.3, 1e4
"""The share of a gentle round in which the price may rise, and by which factor it rises over all of that share. It
starts 50 to some thousand times lower than what makes anything fit."""
PLAIN_GROWTH, BETWEEN = (
    1.5,
    0.33,
)  # without phases: growth of hot rounds' length; length of the reheated rounds between them
TWO = 40  # ops from which on two threads are worth it

STALE, PLAIN_STALE = 62, 11
"""Rounds without improvement after which a search ends, with and without phases. Both take more than 30 times the
shortest round."""
STRIDE, LAST_STRIDE = (
    0.08,
    2e-4,
)  # a descent's steps aim at lowering the peak by this share; it ends when they get smaller than the second
DESCENT = 1.0  # temperature of a descent, percent of the base cost: recomputation hardly counts
DESCENTS = 6
"""Of every eight rounds, the one that is followed by descents if it is hot and found nothing better. Without phases
every hot round is."""
CLEAN, CLEANING = 10, 0.1  # moves an op by which each step of a descent is cheapened, and their temperature


@dataclass
class SearchBudget:
    """What a search may spend: seconds, or a number of moves if ``moves`` is not 0. All amounts are then in that unit.

    With moves, the result is the same on every machine. ``done``: moves made so far. ``began``: monotonic time of the
    start. ``slice_``: moves until the clock is read again. ``interrupted``: whether Ctrl-C ended the search.
    """

    seconds: float
    moves: int = 0
    done: int = 0
    began: float = field(default_factory=lambda: _started())
    slice_: int = MOVES_IN_SLICE
    interrupted: bool = False

    @property
    def total(self) -> float:
        """Everything that may be spent: moves if they are counted, otherwise seconds."""
        return float(self.moves) if self.moves else self.seconds

    def spent(self) -> float:
        """Return what has been spent so far: moves if they are counted, otherwise seconds."""
        return float(self.done) if self.moves else time.monotonic() - self.began

    def shortest_round(self, ops: int, shortest: tuple[float, float]) -> float:
        """Return the length of the shortest round, in moves if they are counted, otherwise in seconds.

        ``ops``: the number of ops. ``shortest``: the moves per op in small problems, and the number of ops at which
        they are twice as many.
        """
        moves = shortest[0] * ops * (1 + ops / shortest[1]) + 1000
        return moves if self.moves else moves / MOVES_A_SECOND

    def stop(self) -> None:
        """Mark all seconds as spent, so that the search soon ends. It has no effect if moves are counted. May be
        called from another thread."""
        self.began = -math.inf

    @property
    def rate(self) -> float:
        """The estimated number of moves per unit of what is spent: per second, or 1 if moves are counted."""
        return 1.0 if self.moves else self.slice_ / SLICE

    def next_slice(self, left: float) -> int:
        """Return the number of moves to make before the clock is read again, at least 1.

        ``left``: what is left to spend; it limits the slice only if moves are counted.
        """
        return max(1, min(self.slice_, int(left) if self.moves else self.slice_))

    def made(self, moves: int, seconds: float) -> None:
        """Record moves that were made; if seconds count, adjust the next slice to their speed."""
        self.done += moves
        if not self.moves:
            self.slice_ = max(200, min(2 * self.slice_, int(moves * SLICE / max(seconds, 1e-6))))


def _started() -> float:
    """Return the time at which a search's clock starts: after its loops are compiled."""
    compile_annealer()
    return time.monotonic()


def luby(k: int) -> int:
    """Return the k-th term, from 0 on, of 1, 1, 2, 1, 1, 2, 4, 1, 1, 2, 1, 1, 2, 4, 8, ..."""
    term = k + 1
    while term & (term + 1):  # until it is 2^i - 1, the end of a repetition, which is followed by 2^(i-1)
        term -= (1 << term.bit_length() - 1) - 1
    return (term + 1) // 2


def _hot(ops: int) -> float:
    """Return the first temperature of a hot round, in percent of the base cost.

    In small problems it is about one op's share of the cost; in large ones it is less, because there is no time to
    cool down.
    """
    return max(0.3, 30.0 / max(ops, 1)) if ops < 600 else 0.1 if ops < 4000 else 0.01


@dataclass
class Search:
    """One search for the cheapest plan of a problem within a budget (bytes).

    ``enough(overhead)``: whether a plan of this overhead needs no improvement; for infinity, whether it is known that
    no plan fits. ``report(fraction, overhead)``: called between slices with the share of the time that is spent and
    the best overhead so far, None if nothing fits yet. ``smallest``: the plan with the smallest peak so far. ``twin``:
    the search of the second thread, if there is one.
    """

    graph: TrainingGraph
    budget: int
    seed: int = 0
    keep_order: bool = False
    enough: Callable[[float], bool] = lambda _: False
    report: Callable[[float, float | None], None] = lambda _fraction, _overhead: None
    suggest: Callable[[], Sequence[str]] = tuple
    """Returns a sequence to start from, perhaps over the budget, or an empty one; called before each round."""
    suggested_to: tuple[int, ...] = (1, 3)
    """The rounds (k mod 4) that start from the suggestion. Odd rounds, which are reheated, use it for a first part;
    the others entirely."""
    best: Plan | None = None
    smallest: Plan | None = None
    twin: Search | None = None
    reached: dict[bool, float] = field(default_factory=lambda: dict.fromkeys((True, False), math.inf))
    """The least overhead at the end of a hot round that looked for an order first (True), and of one that did not
    (False)."""
    ended_early: bool = False
    """Whether the search gave up before its time was spent."""
    interrupted: bool = False
    """Whether a `KeyboardInterrupt` ended the search, so that `run` returned the best plan so far."""

    @property
    def overhead(self) -> float:
        """The overhead of the best plan so far; infinite if there is none. May be read from another thread."""
        best = self.best
        own = math.inf if best is None else best.estimate.overhead
        return own if self.twin is None else min(own, self.twin.overhead)

    def run(self, starts: Sequence[Sequence[str]], effort: SearchBudget) -> Plan | None:
        """Return the best plan within the budget that is found, starts included, or None.

        A `KeyboardInterrupt` ends the search; the best plan so far is returned, and ``interrupted`` is set. It is
        passed on if nothing fits yet.
        """
        self.prepare(starts)
        begun = self.best  # already tidied; to do it again takes seconds if each op runs many times
        try:
            if self._wants_twin(effort):
                self._rounds_in_two(starts, effort)
            else:
                self._rounds(effort)
        except KeyboardInterrupt:
            if self.best is None:
                raise
            self.interrupted = True
        if self.best is not None and self.best is not begun:
            self._offer(self.annealer.tidied(runs_of(self.best.schedule), self.budget))
        return self.best

    def prepare(self, starts: Sequence[Sequence[str]]) -> None:
        """Simulate and tidy the base order and the starts, and keep the best. Starts that are invalid or break a
        required order are left out."""
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
        """The plan with the smallest peak so far, whether or not it fits the budget. Call `prepare` first."""
        assert self.smallest is not None
        return self.smallest

    @property
    def _reorders(self) -> bool:
        return not self.graph.has_phases and not self.keep_order

    @property
    def _heat(self) -> tuple[float, float]:
        """The first and last temperature of a hot round, in percent of the base cost."""
        ops = len(self.base)
        if not self._reorders:
            return _hot(ops), COLD
        least, product = PLAIN_HEAT
        return max(least, product / max(ops, 1)), PLAIN_COLD

    def _wants_twin(self, effort: SearchBudget) -> bool:
        """Whether to use a second thread; not if moves are counted, because the result would depend on the number
        of cores."""
        return self._reorders and not effort.moves and len(self.base) >= TWO and (os.cpu_count() or 1) > 1

    def _rounds_in_two(self, starts: Sequence[Sequence[str]], effort: SearchBudget) -> None:
        """Search in this thread and, with another seed, in a second one, and take over its plans."""
        self.twin = twin = Search(self.graph, self.budget, self.seed + 1, enough=lambda _: self._satisfied())
        beside = SearchBudget(effort.total - effort.spent())

        def search() -> None:
            twin.prepare(starts)
            twin._rounds(beside)

        with ThreadPoolExecutor(1) as pool:
            work = pool.submit(search)
            try:
                self._rounds(effort)
            finally:
                beside.stop()
                work.result()
                for plan in (twin.smallest, twin.best):
                    if plan is not None:
                        self._offer(runs_of(plan.schedule))

    def _rounds(self, effort: SearchBudget) -> None:
        shortest = effort.shortest_round(len(self.base), PLAIN_SHORTEST if self._reorders else SHORTEST)
        hot = self._heat[0]
        k = stale = 0
        most = PLAIN_STALE if self._reorders else STALE
        while stale < most and not self._satisfied() and effort.spent() < effort.total:
            left = effort.total - effort.spent()
            length = shortest * self._length(k)
            before = self.best
            self._round(k, hot, left if 2 * length > left else length, effort)
            stale = stale + 1 if self.best is before else 0
            k += 1
        self.ended_early = stale >= most

    def _length(self, k: int) -> float:
        """Return the length of a round, in shortest rounds."""
        if not self._reorders:
            return GENTLE * luby(k // 4) if self._is_gentle(k) else luby(k // 2)
        return PLAIN_GROWTH ** (k // 2) * (BETWEEN if k % 2 and self.best is not None else 1.0)

    def _is_gentle(self, k: int) -> bool:
        """Whether a round belongs to a gentle pair; every other pair does, once something fits."""
        return not self._reorders and k % 4 >= 2 and self.best is not None

    def _round(self, k: int, hot: float, length: float, effort: SearchBudget) -> None:
        """Run a round: hot and reheated alternately. Without a feasible plan, hot rounds from the base order and
        the starts."""
        annealer, before = self.annealer, self.best
        if near := self._suggested(k):
            share = BEFORE if k % 2 else 1.0
            annealer.load(near, self.budget)
            self._stage(ALL_MOVES, (SUGGESTED * hot, self._heat[1]), share * length, effort, self._set_price)
            if not k % 2:
                return
            length *= 1 - share
        if k % 2 and self.best is not None:
            annealer.load(runs_of(self.best.schedule), self.budget)
            self._warm(k, hot, length, effort)
        else:
            annealer.load(self.starts[k % len(self.starts)] if self.best is None else self.base, self.budget)
            self._anew(k, hot, length, effort)
        if self.best is None:
            self._offer(annealer.current())
            self.descend(effort, min(effort.total, effort.spent() + length))
        elif self.best is before and not self.base_fits and self._descends(k):
            until = min(effort.total, effort.spent() + (BETWEEN * length if self._reorders else length))
            while effort.spent() < until and not self._satisfied():  # each ends in another local minimum
                self.descend(effort, until, anew=True)

    def _anew(self, k: int, hot: float, length: float, effort: SearchBudget) -> None:
        """Cool the loaded sequence from a hot round's temperature.

        Depending on the round, its order is improved first, or the price rises slowly first.
        """
        orders = self._orders(k)
        if orders:
            self._reorder(ORDERING, LOOSE if k // 2 % 4 >= 2 else 1.0, length, effort)
            length *= 1 - ORDERING.share
        if self._is_gentle(k):
            length -= self._press(hot, length, effort)
        self._stage(ALL_MOVES, (hot, self._heat[1]), length, effort, self._set_price)
        ended = self.annealer.best_overhead if self.annealer.feasible else math.inf
        self.reached[orders] = min(self.reached[orders], ended)

    def _warm(self, k: int, hot: float, length: float, effort: SearchBudget) -> None:
        """Cool the best sequence so far, which is loaded: reheated, or after shaking its order."""
        shaken = self._reorders and k % 4 == 1
        if shaken:
            self._reorder(SHAKE, TIGHT, length, effort)
            length *= 1 - SHAKE.share
        heat = (hot if shaken else REHEAT * hot, self._heat[1])
        price = partial(self._set_price, low=SHAKEN) if shaken else self._set_price
        self._stage(ALL_MOVES, heat, length, effort, price)

    def _orders(self, k: int) -> bool:
        """Whether a hot round looks for an order first.

        Rounds alternate until one that did has ended in something that fits. Then the variant that has led further
        is used, except in every fourth round.
        """
        turn = k // 2
        if not self._reorders or turn < 2 or self.reached[True] == math.inf:
            return self._reorders and turn % 2 == 0
        return (self.reached[True] <= self.reached[False]) != (turn % OTHERWISE == OTHERWISE - 1)

    def _press(self, hot: float, length: float, effort: SearchBudget) -> float:
        """Raise the price slowly, at a round's first temperature, until something fits or a share of the round is
        over. Returns what it took."""
        annealer = self.annealer
        began = effort.spent()
        until = began + RISING * length
        annealer.limit_growth(math.pow(RANGE, 1 / max(1.0, RISING * length * effort.rate)))
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
        """Whether descents follow a round that found nothing better."""
        return k % 2 == 0 if self._reorders else k % 8 == DESCENTS

    def _suggested(self, k: int) -> Sequence[str]:
        """Return the current suggestion, if the round can use it; else an empty sequence."""
        near = () if self._reorders or k % 4 not in self.suggested_to else self.suggest()
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

    def _set_price(self, share: float, low: float = PRICES[0]) -> None:
        """Set the price of a byte over the budget, when a share of a stage of all moves is done. ``low``: the first
        price without phases."""
        if not self._reorders or share >= FREE:
            self.annealer.limit_price(math.inf)
            return
        unit = self.annealer.mean_cost / self.annealer.mean_size
        self.annealer.set_price(unit * low * math.pow(PRICES[1] / low, share / FREE))

    def descend(self, effort: SearchBudget, until: float, anew: bool = False) -> None:
        """Lower the smallest peak step by step, until it is within the budget, steps get too small or ``until`` is
        spent.

        Each step aims at a peak a little below the smallest, cools at one temperature until a sequence has it, and
        then lowers its cost; otherwise useless runs would accumulate. A step that fails halves the next one.

        Args:
            effort: what the search may spend.
            until: what the effort may have spent at the end, in its unit.
            anew: start from the base order, not from the plan with the smallest peak so far.
        """
        annealer, stride, patience = self.annealer, STRIDE, 20 * len(self.base) + 1000
        price = (
            0.0  # kept between steps: at a low price a start would be lost before the price is high enough
        )
        at = self._offer(self.base) if anew else self.least
        while at.estimate.peak > self.budget and stride > LAST_STRIDE and effort.spent() < until:
            peak = at.estimate.peak
            aim = max(self.budget, peak - max(1, int(stride * (peak - self.graph.input_bytes))))
            annealer.load(runs_of(at.schedule), aim, price)
            tried = 0
            while tried < patience and not annealer.feasible and effort.spent() < until:
                tried += self._cool(effort, patience - tried, until, (DESCENT, DESCENT), UNTIL_FEASIBLE)
            if annealer.feasible:
                self._cheapen(effort, until)
                at = self._offer(annealer.best())
            else:
                stride /= 2
                patience *= 2
            price = annealer.price

    def _cheapen(self, effort: SearchBudget, until: float) -> None:
        """Lower the cost of the sequence that a descent has just found."""
        moves = CLEAN * len(self.base)
        made = 0
        while made < moves and effort.spent() < until:
            hot = CLEANING * (COLD / CLEANING) ** (made / moves)
            cold = CLEANING * (COLD / CLEANING) ** min(1.0, (made + effort.slice_) / moves)
            made += self._cool(effort, moves - made, until, (hot, cold), ALL_MOVES)

    def _cool(
        self, effort: SearchBudget, most: int, until: float, heat: tuple[float, float], mode: int
    ) -> int:
        """Run one slice of a descent. Returns the moves made."""
        moves = effort.next_slice(min(most, max(1.0, until - effort.spent())) if effort.moves else most)
        clock = time.monotonic()
        made = self.annealer.cool(min(moves, most), *heat, mode)
        effort.made(made, time.monotonic() - clock)
        self._report(effort)
        return made

    def _take(self, annealer: Annealer) -> None:
        if annealer.feasible and (
            self.best is None or annealer.best_overhead < self.best.estimate.overhead - 1e-12
        ):
            self._offer(annealer.best())

    def _offer(self, runs: Sequence[str]) -> Plan:
        """Simulate a sequence, and keep it if it is the best plan or has the smallest peak. Returns its plan."""
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
