"""The base classes of strategies. A strategy is an algorithm that computes a plan for a problem and a budget."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field, replace
from typing import ClassVar, Literal, Self, TypeAlias, TypeVar

from rematplan.ir import CHEAP, InfeasibleBudget, TrainingGraph
from rematplan.planner.core.plan import Plan, by_cost

Row = TypeVar("Row")
Progress: TypeAlias = Callable[[float, str], None]
"""A callback for long work: it receives the fraction done (0 to 1) and a short text.

Raising from it interrupts the work. If it raises `Enough`, the work returns the best result so far.
"""


class Enough(Exception):
    """Raised by a progress callback to make the work stop and return the best result so far."""


INTERRUPTS = (KeyboardInterrupt, Enough)
"""Exceptions after which a search returns its best plan so far, or raises them again if it has none."""


def silent(_fraction: float, _text: str) -> None:
    """A progress callback that does nothing."""


@dataclass(frozen=True)
class Strategy:
    """Base class of strategies: algorithms that choose a plan. The fields of a subclass are the strategy's options,
    in Python (``Anneal(time_limit=5)``) and on the command line (``-S time_limit=5``).

    ``name``: the strategy's name on the command line, as in the literature. ``summary``: one line about it, for
    lists.
    """

    two_lanes: Literal["off", "auto", "on"] = field(default="off", kw_only=True)
    """Whether recomputation and inverses run concurrently with the gradients, on two threads or CUDA streams, and ahead
    of them as far as the budget allows. ``auto``: only if that is predicted to save time."""
    lane_speed: float = field(default=0.0, kw_only=True)
    """The speed of each of two lanes while both work, relative to one that works alone: from 0.5 to 1. If it is 0, it
    is measured where costs are measured, and a typical value otherwise."""

    name: ClassVar[str]
    summary: ClassVar[str]
    resumes: ClassVar[bool] = False
    """Whether a search of this strategy can continue from known plans. If so, callers pass stored plans to ``plan``
    and ``curve`` as ``starts``."""

    @property
    def lasting(self) -> bool:
        """Whether this strategy's plans are worth saving on disk, as starts for searches in later processes."""
        return False

    @property
    def counted(self) -> int:
        """The number of moves that limits a search; 0 if time does, or if there is no limit."""
        return 0

    def plan(
        self, graph: TrainingGraph, budget: int, progress: Progress = silent, starts: Sequence[Plan] = ()
    ) -> Plan:
        """Return the plan of least overhead that this strategy finds within ``budget`` bytes of simulated peak.

        Args:
            graph: the planning problem.
            budget: bytes that the simulated peak must not exceed.
            progress: called with the fraction done (0 to 1) and a short text.
            starts: known plans of the problem, for any budgets, to start from. A strategy that does not search
                ignores them.

        Raises:
            InfeasibleBudget: the strategy finds no plan within the budget. The error states the smallest peak of the
                plans that it found.
        """
        raise NotImplementedError

    def curve(
        self,
        graph: TrainingGraph,
        budgets: Sequence[int],
        progress: Progress = silent,
        starts: Sequence[Plan] = (),
    ) -> tuple[Plan, ...]:
        """Return plans along the trade-off of memory and overhead, by falling peak and rising overhead. Every plan
        has less overhead than all plans with a smaller peak.

        A strategy that plans for one budget at a time plans for each of ``budgets`` (bytes). A strategy whose plans
        do not depend on the budget ignores ``budgets`` and returns the Pareto front of all its plans. ``progress``,
        ``starts``: as in `Strategy.plan`.
        """
        raise NotImplementedError


@dataclass(frozen=True)
class FamilyStrategy(Strategy):
    """Base class of strategies whose candidate plans do not depend on the budget. The cheapest candidate that
    fits is the plan.
    """

    def family(self, graph: TrainingGraph, progress: Progress = silent) -> Iterable[Plan]:
        """Yield all candidate plans. Their field ``budget`` is None."""
        raise NotImplementedError

    def plan(
        self, graph: TrainingGraph, budget: int, progress: Progress = silent, starts: Sequence[Plan] = ()
    ) -> Plan:
        """Return the cheapest candidate within ``budget`` bytes. `InfeasibleBudget` if none fits: it has the candidate
        with the smallest peak, and that with the smallest peak of those with an overhead of at most `CHEAP`, if any.
        ``starts`` are ignored."""
        del starts
        found = self.around(graph, budget, progress)
        if found[0].estimate.peak > budget:
            affordable = (p for p in self.curve(graph, ()) if p.estimate.overhead <= CHEAP)
            cheap = min(affordable, key=lambda p: p.estimate.peak, default=None)
            raise InfeasibleBudget(
                self.name,
                budget,
                found[-1].estimate.peak,
                plan=found[-1],
                cheap=cheap.estimate.peak if cheap else 0,
                cheap_plan=cheap,
            )
        return replace(found[0], budget=budget)

    def around(self, graph: TrainingGraph, budget: int, progress: Progress = silent) -> tuple[Plan, ...]:
        """Return the cheapest candidate within ``budget`` bytes, then the one with the smallest peak; one
        plan if they are the same or none fits.
        """
        front = self.curve(graph, (), progress)
        fitting = [p for p in front if p.estimate.peak <= budget]
        return tuple({p.estimate.peak: p for p in (*fitting[:1], front[-1])}.values())

    def curve(
        self,
        graph: TrainingGraph,
        budgets: Sequence[int],
        progress: Progress = silent,
        starts: Sequence[Plan] = (),
    ) -> tuple[Plan, ...]:
        """Return the Pareto front of all candidate plans, by rising overhead and falling peak. ``budgets`` and
        ``starts`` are ignored."""
        del budgets, starts
        return pareto(self.family(graph, progress))


@dataclass(frozen=True)
class SearchStrategy(Strategy):
    """Base class of strategies that search for a plan within one budget, for up to ``time_limit`` seconds."""

    time_limit: float = 30.0

    carried: ClassVar[int] = 0
    """In `curve`, how many of the latest plans for larger budgets are starts for the search at the next budget."""

    @property
    def lasting(self) -> bool:
        """True: plans of a search are saved on disk, as starts for searches in later processes."""
        return True

    def share(self, count: int) -> Self:
        """Return this strategy with its time limit divided by ``count``."""
        return replace(self, time_limit=self.time_limit / count)

    def curve(
        self,
        graph: TrainingGraph,
        budgets: Sequence[int],
        progress: Progress = silent,
        starts: Sequence[Plan] = (),
    ) -> tuple[Plan, ...]:
        """Return undominated plans by falling peak, at most one for each budget, within equal shares of the time limit.
        Budgets are tried from the largest down, until one is found infeasible. Each search starts from ``starts`` and
        the latest `carried` plans."""
        falling = sorted(set(budgets), reverse=True)
        share = self.share(max(1, len(falling)))
        plans: list[Plan] = []
        for k, budget in enumerate(falling):

            def report(fraction: float, text: str, k: int = k) -> None:
                progress((k + fraction) / len(falling), text)

            last = plans[max(0, len(plans) - self.carried) :]
            try:
                plans.append(share.plan(graph, budget, report, (*starts, *last)))
            except InfeasibleBudget:
                break  # smaller budgets do not fit either
        return pareto(plans)


def pareto(plans: Iterable[Plan]) -> tuple[Plan, ...]:
    """Return the Pareto front in cost and peak, by rising cost; of equal plans the first."""
    return tuple(undominated(plans, by_cost))


def undominated(rows: Iterable[Row], cost_and_peak: Callable[[Row], tuple[float, int]]) -> list[Row]:
    """Return the rows of the Pareto front, by rising cost and falling peak; of equal rows the first."""
    front: list[Row] = []
    least = math.inf
    for row in sorted(rows, key=cost_and_peak):
        if (peak := cost_and_peak(row)[1]) < least:
            least = peak
            front.append(row)
    return front
