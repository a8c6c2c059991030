"""Descents: searches that lower a plan's peak step by step, for budgets that annealing does not meet."""

from __future__ import annotations

import math
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
    """The constants of descents, tuned by hand; no measurements were kept. Temperatures are in percent of the base
    cost."""

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
    cleaning_share: float = 0.0
    """The share of the effort left for lowering the cost, spread over the steps that are still to come. It is used
    where it makes more than ``cleaning_moves``."""
    round_of_eight: int = 6
    """With phases: descents follow the annealing rounds k with k mod 8 equal to this that found nothing better.
    Without phases they follow each hot round that found nothing better. With phases such descents are rare, because
    hot rounds find better plans more often."""


DESCENTS = DescentOptions()


@dataclass
class Descent:
    """A search that lowers a plan's peak towards ``budget`` bytes, step by step, by simulated annealing."""

    annealer: Annealer
    budget: int
    ops: int
    """The number of ops without recomputation."""
    inputs: int
    """Bytes of the inputs."""
    offer: Callable[[Sequence[str]], Plan]
    """Simulates a sequence of runs and returns its plan."""
    report: Callable[[Effort], None]
    """Called often, with the effort spent so far."""
    options: DescentOptions = DESCENTS

    def run(self, start: Plan, effort: Effort, until: float, enough: int = 0) -> None:
        """Lower the peak of ``start`` until it is at most the budget or ``enough`` bytes, steps are too small, or
        ``effort.spent()`` reaches ``until``. Plans found go to ``offer``."""
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
                # Otherwise useless recomputations would accumulate.
                self._cheapen(effort, until, self._steps(peak, step))
                plan = self.offer(annealer.best())
            else:
                step /= 2
                patience *= 2
            price = annealer.price

    def _steps(self, peak: int, step: float) -> float:
        """Return how many steps of this share lead from ``peak`` to the budget."""
        low, high = max(1, self.budget - self.inputs), max(1, peak - self.inputs)
        return max(1.0, math.log(high / low) / -math.log1p(-step))

    def _cheapen(self, effort: Effort, until: float, steps: float) -> None:
        """Lower the cost of the sequence just found within the same budget, at most until ``effort.spent()`` reaches
        ``until``. ``steps``: how many steps of the descent are still to come, this one included."""
        options, left = self.options, max(0.0, until - effort.spent())
        share = options.cleaning_share * left / steps if left < math.inf else 0.0
        moves = max(options.cleaning_moves * self.ops, int(share * effort.rate))
        hot, cold, made = options.cleaning_heat, LAST_HEAT, 0
        while made < moves and effort.spent() < until:
            first = hot * (cold / hot) ** (made / moves)
            last = hot * (cold / hot) ** min(1.0, (made + effort.slice_) / moves)
            made += self._cool(effort, moves - made, until, (first, last), ALL_MOVES)

    def _cool(self, effort: Effort, most: int, until: float, heat: tuple[float, float], mode: int) -> int:
        """Anneal for one slice of at most ``most`` moves, record and report the effort, and return the moves made."""
        moves = effort.next_slice(min(most, max(1.0, until - effort.spent())) if effort.moves else most)
        made = self.annealer.cool_slice(effort, min(moves, most), *heat, mode)
        self.report(effort)
        return made
