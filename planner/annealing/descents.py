"""Descents: the smallest peak is lowered step by step, for budgets that no cooling from the base order meets."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from rematplan.planner.annealing.annealer import ALL_MOVES, UNTIL_FEASIBLE, Annealer
from rematplan.planner.annealing.cooling_schedule import WITH_PHASES
from rematplan.planner.annealing.search_budget import SearchBudget
from rematplan.planner.core.plan import Plan
from rematplan.planner.core.schedule import runs_of

LAST_HEAT = WITH_PHASES.last_heat
"""The last temperature of the moves that make a step cheaper."""


@dataclass(frozen=True)
class DescentOptions:
    """The constants of descents: searches that lower the smallest peak step by step. Temperatures are in percent of
    the cost of running each op once.

    They were chosen by trial, on the networks of the README, without a record.
    """

    first_step: float = 0.08
    """The first step: the share of the peak (without inputs) by which the step aims to lower the peak."""
    last_step: float = 2e-4
    """A descent ends when its step, which is halved after each failure, is smaller than this."""
    heat: float = 1.0
    """The temperature: recomputation hardly counts."""
    patience: tuple[int, int] = (20, 1000)
    """Moves per op, and moves in addition, after which the first step has failed. After each failure both are
    doubled."""
    cleaning_moves: int = 10
    """Moves per op by which each step is made cheaper. Without them useless runs accumulate."""
    cleaning_heat: float = 0.1
    """The first temperature of the ``cleaning_moves``."""
    round_of_eight: int = 6
    """With phases, the round of every eight that is followed by descents if it found nothing better; without phases
    every hot round is. Descents from the order without recomputation are rare, because hot rounds find plans more
    often."""


DESCENTS = DescentOptions()


@dataclass
class Descent:
    """A search that lowers the peak of a plan step by step, with an annealer.

    ``annealer``: for the problem. ``budget``: bytes; a peak of at most this ends the search. ``ops``: the number of
    ops. ``inputs``: the bytes of the problem's inputs, which no schedule frees. ``offer``: simulates a sequence of
    runs and returns its plan. ``report``: called often, with what is spent. ``options``: the constants.
    """

    annealer: Annealer
    budget: int
    ops: int
    inputs: int
    offer: Callable[[Sequence[str]], Plan]
    report: Callable[[SearchBudget], None]
    options: DescentOptions = DESCENTS

    def run(self, start: Plan, effort: SearchBudget, until: float) -> None:
        """Lower the peak of a plan step by step, until it is within the budget, steps get too small or ``until`` is
        spent. Each plan found is passed to ``offer``.

        Each step aims at a peak a little below the smallest, cools at one temperature until a sequence has it, and
        then lowers its cost; otherwise useless runs would accumulate. After a step that fails, steps are half as
        large.

        Args:
            start: the plan to start from.
            effort: the time or number of moves that the search may spend; what it spends is recorded there.
            until: how much of ``effort`` may be spent when the search ends: seconds or moves.
        """
        annealer, options, plan = self.annealer, self.options, start
        step, patience = options.first_step, options.patience[0] * self.ops + options.patience[1]
        # Kept between steps: at a low price a start would be lost before the price is high enough.
        price = 0.0
        while plan.estimate.peak > self.budget and step > options.last_step and effort.spent() < until:
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

    def _cheapen(self, effort: SearchBudget, until: float) -> None:
        """Lower the cost of the sequence that a step has just found."""
        moves, hot, cold = self.options.cleaning_moves * self.ops, self.options.cleaning_heat, LAST_HEAT
        made = 0
        while made < moves and effort.spent() < until:
            first = hot * (cold / hot) ** (made / moves)
            last = hot * (cold / hot) ** min(1.0, (made + effort.slice_) / moves)
            made += self._cool(effort, moves - made, until, (first, last), ALL_MOVES)

    def _cool(
        self, effort: SearchBudget, most: int, until: float, heat: tuple[float, float], mode: int
    ) -> int:
        """Run one slice of an anneal, and return the number of moves made."""
        moves = effort.next_slice(min(most, max(1.0, until - effort.spent())) if effort.moves else most)
        clock = time.monotonic()
        made = self.annealer.cool(min(moves, most), *heat, mode)
        effort.made(made, time.monotonic() - clock)
        self.report(effort)
        return made
