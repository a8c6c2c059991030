"""The interface of strategies: a strategy turns a problem and a budget into a plan."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from typing import ClassVar, TypeAlias, TypeVar

from rematplan.ir import CHEAP, InfeasibleBudget, TrainingGraph
from rematplan.planner.core.plan import Plan

Row = TypeVar("Row")
Progress: TypeAlias = Callable[[float, str], None]
"""Callback for long work: it receives the fraction done (0 to 1) and a short text.

Raising from it interrupts the work. After `Enough`, the best result so far is returned.
"""


class Enough(Exception):
    """Raised by a progress callback when its time is over."""


def silent(_fraction: float, _text: str) -> None:
    """A progress callback that does nothing."""


@dataclass(frozen=True)
class Strategy:
    """Base class of strategies. Its fields are the strategy's options, also on the command line (``--objective
    time``).

    ``name`` follows the literature.
    """

    name: ClassVar[str]
    summary: ClassVar[str]
    resumes: ClassVar[bool] = False
    """Whether the search starts from plans that it is given."""

    @property
    def lasting(self) -> bool:
        """Whether the plans are worth keeping on disk, to start later processes from."""
        return False

    def plan(
        self, graph: TrainingGraph, budget: int, progress: Progress = silent, starts: Sequence[Plan] = ()
    ) -> Plan:
        """Return the plan of least overhead that this strategy finds within ``budget`` bytes of simulated peak.

        Args:
            starts: known plans of the problem, for any budgets. A strategy that does not search ignores them.

        Raises:
            InfeasibleBudget: the strategy finds no schedule that fits; the error has the smallest peak found.
        """
        raise NotImplementedError

    def curve(
        self,
        graph: TrainingGraph,
        budgets: Sequence[int],
        progress: Progress = silent,
        starts: Sequence[Plan] = (),
    ) -> tuple[Plan, ...]:
        """Return plans along the memory/overhead trade-off, by falling peak and rising overhead, none dominated.

        A strategy that plans for one budget at a time plans for ``budgets``. A strategy whose plans do not depend
        on the budget ignores them and returns the Pareto front of all its plans.
        """
        raise NotImplementedError


@dataclass(frozen=True)
class FamilyStrategy(Strategy):
    """Base class of strategies whose candidate plans do not depend on the budget.

    The plan for a budget is the cheapest candidate that fits. So peak and overhead are monotone in the budget, and
    the smallest reachable peak is that of the leanest candidate.
    """

    def family(self, graph: TrainingGraph, progress: Progress = silent) -> Iterable[Plan]:
        """Yield all candidate plans, without a budget."""
        raise NotImplementedError

    def plan(
        self, graph: TrainingGraph, budget: int, progress: Progress = silent, starts: Sequence[Plan] = ()
    ) -> Plan:
        """See `Strategy.plan`. ``starts`` is ignored."""
        del starts
        found = self.around(graph, budget, progress)
        if found[0].estimate.peak > budget:
            cheap = min(
                (p.estimate.peak for p in self.curve(graph, ()) if p.estimate.overhead <= CHEAP), default=0
            )
            raise InfeasibleBudget(self.name, budget, found[-1].estimate.peak, plan=found[-1], cheap=cheap)
        return replace(found[0], budget=budget)

    def around(self, graph: TrainingGraph, budget: int, progress: Progress = silent) -> tuple[Plan, ...]:
        """Return the cheapest plan within the budget, if there is one, followed by the plan of the smallest peak,
        if it is another."""
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
        """See `Strategy.curve`. ``budgets`` and ``starts`` are ignored."""
        del budgets, starts
        return pareto(self.family(graph, progress))


def pareto(plans: Iterable[Plan]) -> tuple[Plan, ...]:
    """Return the plans that no other plan dominates, by rising overhead and falling peak. Of equal plans the first
    is kept."""
    return tuple(undominated(plans, lambda p: (p.estimate.cost, p.estimate.peak)))


def undominated(rows: Iterable[Row], cost_and_peak: Callable[[Row], tuple[float, int]]) -> list[Row]:
    """Return the rows that no other row beats in both cost and peak, by rising cost. Of equal rows the first is
    kept."""
    front: list[Row] = []
    least = math.inf
    for row in sorted(rows, key=cost_and_peak):
        if (peak := cost_and_peak(row)[1]) < least:
            least = peak
            front.append(row)
    return front
