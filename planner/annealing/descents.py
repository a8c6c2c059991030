"""Descents: searches that lower the peak of a plan step by step. They are for budgets that annealing from the order
without recomputation does not meet."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from rematplan.planner.annealing.annealer import ALL_MOVES, UNTIL_FEASIBLE, Annealer
from rematplan.planner.annealing.cooling_schedule import WITH_PHASES
from rematplan.planner.core.effort import Effort
from rematplan.planner.core.plan import Plan
from rematplan.planner.core.schedule import runs_of

LAST_HEAT = WITH_PHASES.last_heat
"""The final temperature of the moves that lower the cost after each step of a descent."""


@dataclass(frozen=True)
class DescentOptions:
    """The constants of descents: searches that lower the peak of a plan step by step. Temperatures are in percent of
    the cost of running each op once.

    The values were chosen by trial, on the networks of the README; the trials were not recorded.
    """

    first_step: float = 0.08
    """The share of the peak, without inputs, by which the first step aims to lower the peak."""
    last_step: float = 2e-4
    """A descent ends when the share of the peak by which the next step aims to lower it is at most this. The share is
    halved after each step that fails."""
    heat: float = 1.0
    """The temperature of a step, constant. It is so high that the cost of recomputation hardly matters."""
    patience: tuple[int, int] = (20, 1000)
    """The number of moves after which a step has failed: the first number for each op, plus the second. After each
    failure the result is doubled."""
    cleaning_moves: int = 10
    """The number of moves per op, after each step that succeeds, to lower the cost. Without these moves, useless
    recomputations accumulate."""
    cleaning_heat: float = 0.1
    """The initial temperature of the ``cleaning_moves``."""
    round_of_eight: int = 6
    """With phases: descents follow the annealing rounds k with k mod 8 equal to this that found nothing better.
    Without phases they follow each hot round that found nothing better. With phases such descents are rare, because
    hot rounds find better plans more often."""


DESCENTS = DescentOptions()


@dataclass
class Descent:
    """A search that lowers the peak of a plan step by step by simulated annealing.

    ``annealer``: an annealer for the planning problem. ``budget``: in bytes; the search ends at a peak of at most
    this. ``ops``: the number of ops of the problem. ``inputs``: the bytes of the problem's inputs, which no schedule
    frees. ``offer``: a function that simulates a sequence of runs (names of ops) and returns its plan. ``report``:
    called often, with the effort spent so far. ``options``: the constants of the search.
    """

    annealer: Annealer
    budget: int
    ops: int
    inputs: int
    offer: Callable[[Sequence[str]], Plan]
    report: Callable[[Effort], None]
    options: DescentOptions = DESCENTS

    def run(self, start: Plan, effort: Effort, until: float, enough: int = 0) -> None:
        """Lower the peak of a plan step by step, until the peak is within the budget, steps become too small, or
        ``until`` is spent. Each plan found is passed to ``offer``.

        A step aims at a peak a little below the current one. It anneals at a constant temperature until a sequence
        has that peak, and then lowers the sequence's cost, because otherwise useless recomputations would accumulate.
        After a step that fails, the next one aims at half the reduction.
        """
        annealer, options, plan = self.annealer, self.options, start
        step, patience = options.first_step, options.patience[0] * self.ops + options.patience[1]
        # The price is kept between steps. From a low price, annealing would leave the start before the price is high
        # enough to keep the peak small.
        price = 0.0
        fits = max(self.budget, enough)
        while plan.estimate.peak > fits and step > options.last_step and effort.spent() < until:
            peak = plan.estimate.peak
            aim = max(self.budget, peak - max(1, int(step * (peak - self.inputs))))
            annealer.load(runs_of(plan.schedule), aim, price)
            tried = 0
            while tried < patience and not annealer.feasible and effort.spent() < until:
                heat = (options.heat, options.heat)
                tried += self._cool(effort, patience - tried, until, heat, UNTIL_FEASIBLE)
            if annealer.feasible:
                self._cheapen(effort, until)
                plan = self.offer(annealer.best())
            else:
                step /= 2
                patience *= 2
            price = annealer.price

    def _cheapen(self, effort: Effort, until: float) -> None:
        """Lower the cost of the sequence that a step of the descent has just found, by annealing within the same
        budget. It ends after a fixed number of moves, or when ``until`` of ``effort`` (seconds or moves) is spent."""
        moves, hot, cold = self.options.cleaning_moves * self.ops, self.options.cleaning_heat, LAST_HEAT
        made = 0
        while made < moves and effort.spent() < until:
            first = hot * (cold / hot) ** (made / moves)
            last = hot * (cold / hot) ** min(1.0, (made + effort.slice_) / moves)
            made += self._cool(effort, moves - made, until, (first, last), ALL_MOVES)

    def _cool(self, effort: Effort, most: int, until: float, heat: tuple[float, float], mode: int) -> int:
        """Anneal for a short time, at most ``most`` moves and until ``until`` of ``effort`` (seconds or moves) is
        spent. Record what was spent, report it, and return the number of moves made.

        ``heat``: the initial and the final temperature. ``mode``: the kinds of moves (see `Annealer.cool`).
        """
        moves = effort.next_slice(min(most, max(1.0, until - effort.spent())) if effort.moves else most)
        clock = time.thread_time()
        made = self.annealer.cool(min(moves, most), *heat, mode)
        effort.made(made, time.thread_time() - clock)
        self.report(effort)
        return made
