"""How the annealer's time is spent: rounds of cooling, hot ones and reheated ones in turn.

A hot round starts from the base order, a reheated one from the best sequence so far; a round that would start
anew although nothing feasible is known starts from the best start instead.

In which valley a hot round ends is decided early and hardly depends on its length, so that many short ones find a
deep one sooner than a few slow ones. How short they may be differs from problem to problem: their lengths follow
the sequence of Luby, Sinclair and Zuckerman (1993), which gives each power of two about the same share of the time
and takes no more than a logarithm longer than the best length, were it known.

That is decided early because the price of what is over the budget rises in the first few ten thousand moves, however
long the round is: it quenches. Every other pair of rounds is gentle, once something fits: the price takes its time, at
the first temperature. Where memory is scarcest that finds valleys that a quench misses; elsewhere many quenches are as
good, and in the time of a few thousand moves a slow rise finds nothing.

In problems without phases hot rounds look for an order first, or do not: whichever has led further. A second thread
does the same from another seed. An order that saves bytes is soon found, but it may lead away from the best drops, most
where the problem is nearly a training step. Which tensors to drop takes a slow cooling: hot rounds grow slowly, so that
there are several, and what stands between them is short. No reheating leads from one order to another; every other
reheated round therefore shakes the order first.
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
SUGGESTED = 0.3  # of a hot round's temperature, for what is suggested from elsewhere
BEFORE = 0.25  # share of a reheated round that it gets first


class Ordering(NamedTuple):
    """A stage that only reorders, in problems without phases. ``share``: of its round. ``heat``: temperatures, in
    tensors of mean size that are over the budget at one run. The price stands still then: were it raised as long as
    nothing fits, it would freeze the order."""

    share: float
    heat: tuple[float, float]


ORDERING = Ordering(0.4, (300.0, 1.0))
"""Of hot rounds."""
LOOSE = 1.15
"""The share of the budget that every other pair of hot rounds looks for an order at: the order with the fewest bytes
over the budget itself is nearly always the same, and need not be the one from which drops cost least."""
OTHERWISE = 4  # which of so many hot rounds does the opposite of what has led further, an order first or none
SHAKE, TIGHT, SHAKEN = Ordering(0.3, (100.0, 1.0)), 0.85, 0.5
"""Of every other reheated round, the share of the budget that it reorders at, and the first price after it: what fits
is reordered as if it had to fit in less, and what has become needless is taken out."""
PRICES, FREE = (0.1, 10.0), 0.9
"""What a tensor of mean size over the budget at one run costs, in runs of mean cost: at the beginning of a stage
without phases, and after the share of it from which on it rises as long as nothing fits. At low budgets nothing fits
for long; a price that rises all the while freezes the drops that happen to be there."""
PLAIN_HEAT, PLAIN_COLD = (0.1, 30.0), 0.003
"""Without phases: least temperature of a hot round, its product with the number of ops otherwise, and the last one."""


SHORTEST = (75.0, 5000.0)
PLAIN_SHORTEST = (150.0, 1000.0)  # without phases
"""Moves an op in the shortest round, and the number of ops at which it is twice as many."""
MOVES_A_SECOND = 300_000
GENTLE = 4  # times as long as a steep round is a gentle one, in which the price rises slowly
RISING, RANGE = 0.3, 1e4
"""Share of a gentle round in which the price may rise, and by how much it does in all of that. It begins far below what
would make anything fit, by a factor of 50 to some thousands."""
PLAIN_GROWTH, BETWEEN = 1.5, 0.33  # without phases: of hot rounds' length; length of what stands between them
TWO = 40  # ops from which on two threads are worth it

STALE, PLAIN_STALE = 62, 11
"""Rounds without improvement after which a search ends, the second without phases: both take over 30 times the
shortest round."""
STRIDE, LAST_STRIDE = 0.08, 2e-4  # shares of the peak by which a descent's steps try to lower it
DESCENT = 1.0  # temperature of a descent, percent of the base cost: recomputation is no object
DESCENTS = 6
"""Which of every eight rounds is followed by descents, if it is a hot one that found nothing better; without phases
each is."""
CLEAN, CLEANING = 10, 0.1  # moves an op by which each step of a descent is cheapened, and their temperature


@dataclass
class SearchBudget:
    """What a search may spend: seconds, or moves if ``moves`` is not 0 (the result then is the same on every
    machine).

    Everything is counted in the one unit or the other.
    """

    seconds: float
    moves: int = 0
    done: int = 0
    began: float = field(default_factory=lambda: _started())
    slice_: int = MOVES_IN_SLICE

    @property
    def total(self) -> float:
        """All that may be spent."""
        return float(self.moves) if self.moves else self.seconds

    def spent(self) -> float:
        """What has been spent."""
        return float(self.done) if self.moves else time.monotonic() - self.began

    def shortest_round(self, ops: int, shortest: tuple[float, float]) -> float:
        """What the shortest round may take: more moves an op the more ops there are."""
        moves = shortest[0] * ops * (1 + ops / shortest[1]) + 1000
        return moves if self.moves else moves / MOVES_A_SECOND

    def stop(self) -> None:
        """Have everything spent; may be called from another thread."""
        self.began = -math.inf

    @property
    def rate(self) -> float:
        """Moves for one of what is counted, as far as is known."""
        return 1.0 if self.moves else self.slice_ / SLICE

    def next_slice(self, left: float) -> int:
        """The number of moves to make before looking again."""
        return max(1, min(self.slice_, int(left) if self.moves else self.slice_))

    def made(self, moves: int, seconds: float) -> None:
        """Note moves made; where seconds count, the next slice is fitted to them."""
        self.done += moves
        if not self.moves:
            self.slice_ = max(200, min(2 * self.slice_, int(moves * SLICE / max(seconds, 1e-6))))


def _started() -> float:
    """The time at which a search's clock starts: once its hot loops are compiled."""
    compile_annealer()
    return time.monotonic()


def luby(k: int) -> int:
    """The k-th term, from 0 on, of 1, 1, 2, 1, 1, 2, 4, 1, 1, 2, 1, 1, 2, 4, 8, ..."""
    term = k + 1
    while term & (term + 1):  # until it is 2^i - 1, the end of a repetition, which is followed by 2^(i-1)
        term -= (1 << term.bit_length() - 1) - 1
    return (term + 1) // 2


def _hot(ops: int) -> float:
    """The temperature of a hot round, percent of the base cost: about an op's share in small problems, less
    in large ones, which have no time to cool from there."""
    return max(0.3, 30.0 / max(ops, 1)) if ops < 600 else 0.1 if ops < 4000 else 0.01


@dataclass
class Search:
    """One search at one budget.

    ``enough(overhead)``: whether a plan of that overhead needs no improvement (infinite: whether it is known that
    there is no plan). ``report(fraction, overhead)``: called
    between slices with the best overhead so far, or None.
    """

    graph: TrainingGraph
    budget: int
    seed: int = 0
    keep_order: bool = False
    enough: Callable[[float], bool] = lambda _: False
    report: Callable[[float, float | None], None] = lambda _fraction, _overhead: None
    suggest: Callable[[], Sequence[str]] = tuple
    """A sequence to begin with that may be over the budget, or an empty one; asked before each round."""
    suggested_to: tuple[int, ...] = (1, 3)
    """Which of every four rounds begin with it: the odd, reheated ones for a part of each, the others whole."""
    best: Plan | None = None
    smallest: Plan | None = None
    twin: Search | None = None
    reached: dict[bool, float] = field(default_factory=lambda: dict.fromkeys((True, False), math.inf))
    """The least overhead at the end of a hot round that looked for an order first, and of one that did not."""
    ended_early: bool = False
    """Whether the search gave up improving before its time was spent."""
    interrupted: bool = False
    """Whether a `KeyboardInterrupt` ended the search, so that `run` returned the best plan so far."""

    @property
    def overhead(self) -> float:
        """Of the best plan so far; infinite if there is none. May be asked from another thread."""
        best = self.best
        own = math.inf if best is None else best.estimate.overhead
        return own if self.twin is None else min(own, self.twin.overhead)

    def run(self, starts: Sequence[Sequence[str]], effort: SearchBudget) -> Plan | None:
        """The best plan within the budget that the effort finds, the starts included, or None.

        A `KeyboardInterrupt` ends the search; the best so far is returned all the same, and ``interrupted`` is set. It
        is passed on where nothing fits yet.
        """
        self.prepare(starts)
        begun = self.best  # tidy: to find that again takes seconds where each op runs many times
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
        """Price the base order and the starts; those that break the order that must be kept are left out."""
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
        """The plan of the smallest peak met so far, whatever the budget."""
        assert self.smallest is not None
        return self.smallest

    @property
    def _reorders(self) -> bool:
        return not self.graph.has_phases and not self.keep_order

    @property
    def _heat(self) -> tuple[float, float]:
        """The first and the last temperature of a hot round, percent of the base cost."""
        ops = len(self.base)
        if not self._reorders:
            return _hot(ops), COLD
        least, product = PLAIN_HEAT
        return max(least, product / max(ops, 1)), PLAIN_COLD

    def _wants_twin(self, effort: SearchBudget) -> bool:
        """Not where moves are counted: the result would not be the same on a machine of one core."""
        return self._reorders and not effort.moves and len(self.base) >= TWO and (os.cpu_count() or 1) > 1

    def _rounds_in_two(self, starts: Sequence[Sequence[str]], effort: SearchBudget) -> None:
        """Search here and, from another seed, in a second thread; what that finds is taken over."""
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
        """Of a round, in shortest rounds."""
        if not self._reorders:
            return GENTLE * luby(k // 4) if self._is_gentle(k) else luby(k // 2)
        return PLAIN_GROWTH ** (k // 2) * (BETWEEN if k % 2 and self.best is not None else 1.0)

    def _is_gentle(self, k: int) -> bool:
        """Whether a round is one of the gentle pairs, of which every other pair is once something fits."""
        return not self._reorders and k % 4 >= 2 and self.best is not None

    def _round(self, k: int, hot: float, length: float, effort: SearchBudget) -> None:
        """Hot and reheated rounds in turn; without a feasible plan, hot ones from the base order and the
        starts."""
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
            while effort.spent() < until and not self._satisfied():  # each ends in a valley of its own
                self.descend(effort, until, anew=True)

    def _anew(self, k: int, hot: float, length: float, effort: SearchBudget) -> None:
        """Cool what is loaded from a hot round's temperature, its order sought first or its price raised slowly where
        the round is one for that."""
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
        """Cool the best sequence so far, which is loaded: reheated, or after its order was shaken."""
        shaken = self._reorders and k % 4 == 1
        if shaken:
            self._reorder(SHAKE, TIGHT, length, effort)
            length *= 1 - SHAKE.share
        heat = (hot if shaken else REHEAT * hot, self._heat[1])
        price = partial(self._set_price, low=SHAKEN) if shaken else self._set_price
        self._stage(ALL_MOVES, heat, length, effort, price)

    def _orders(self, k: int) -> bool:
        """Whether a hot round looks for an order first: in turn, until one that does has ended in something that fits;
        then as has led further by now, but for each fourth."""
        turn = k // 2
        if not self._reorders or turn < 2 or self.reached[True] == math.inf:
            return self._reorders and turn % 2 == 0
        return (self.reached[True] <= self.reached[False]) != (turn % OTHERWISE == OTHERWISE - 1)

    def _press(self, hot: float, length: float, effort: SearchBudget) -> float:
        """Let the penalty's price rise slowly, at a round's first temperature, until something fits or a share of the
        round is over. Returns what that took."""
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
        """Whether a round is one that descents follow where it found nothing better."""
        return k % 2 == 0 if self._reorders else k % 8 == DESCENTS

    def _suggested(self, k: int) -> Sequence[str]:
        """What is suggested now, if a round can make use of it."""
        near = () if self._reorders or k % 4 not in self.suggested_to else self.suggest()
        return near if near and self.annealer.accepts(near) else ()

    def _reorder(self, ordering: Ordering, share: float, length: float, effort: SearchBudget) -> None:
        """Look for an order of the present runs with few bytes over a share of the budget."""
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
        """Cool the present sequence down from one temperature to another with moves of one kind. ``set_price``: called
        before each slice with the share of the stage that is done."""
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
        """Set the price of a byte over the budget in a stage of all moves, a share of it done. ``low``: the first
        price without phases."""
        if not self._reorders or share >= FREE:
            self.annealer.limit_price(math.inf)
            return
        unit = self.annealer.mean_cost / self.annealer.mean_size
        self.annealer.set_price(unit * low * math.pow(PRICES[1] / low, share / FREE))

    def descend(self, effort: SearchBudget, until: float, anew: bool = False) -> None:
        """Lower the smallest peak, or with ``anew`` the base order's, step by step,
        down to the budget or until ``until`` is spent.

        Each step asks for a peak a little below the smallest, cools at one temperature until a sequence has it,
        and then lowers its cost, without which runs of no use would pile up; a step that fails halves the next.
        """
        annealer, stride, patience = self.annealer, STRIDE, 20 * len(self.base) + 1000
        price = 0.0  # kept from step to step: at a low price a start falls apart before it is dear enough
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
        """One slice of a descent; returns the moves made."""
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
        """Price a sequence with the simulator; keep it if it is the best plan, or the one of the smallest
        peak. Returns its plan."""
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
