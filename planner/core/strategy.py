"""What every strategy is: a name and a function from a problem and a budget to a plan."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from typing import ClassVar, TypeAlias, TypeVar

from rematplan.ir import InfeasibleBudget, TrainingGraph
from rematplan.planner.core.plan import Plan

Row = TypeVar("Row")
Progress: TypeAlias = Callable[[float, str], None]
"""Called during long work with the fraction done (0..1) and a short text. Raising from it interrupts the work; after
`Enough` what was found so far is the answer."""


class Enough(Exception):
    """Raised by a progress callback whose time is over."""


def silent(_fraction: float, _text: str) -> None:
    """Progress that goes nowhere."""


@dataclass(frozen=True)
class Strategy:
    """A strategy. Its fields are its options, on the command line too (``--objective time``); its name is the
    literature's."""

    name: ClassVar[str]
    summary: ClassVar[str]
    resumes: ClassVar[bool] = False
    """Whether its search begins with start plans."""

    @property
    def lasting(self) -> bool:
        """Whether its plans are worth keeping on disk, as starts for later processes."""
        return False

    def plan(
        self, graph: TrainingGraph, budget: int, progress: Progress = silent, starts: Sequence[Plan] = ()
    ) -> Plan:
        """The plan of least overhead that this strategy finds within ``budget`` bytes of simulated peak.

        Args:
            starts: known plans of the problem, for any budgets; a strategy that does not search ignores them.

        Raises:
            InfeasibleBudget: it knows no schedule that fits; carries the smallest peak that it can reach.
        """
        raise NotImplementedError

    def curve(
        self,
        graph: TrainingGraph,
        budgets: Sequence[int],
        progress: Progress = silent,
        starts: Sequence[Plan] = (),
    ) -> tuple[Plan, ...]:
        """Plans along the memory/overhead trade-off, by falling peak and rising overhead, none dominated.

        ``budgets`` are suggestions: a strategy that plans for one budget at a time uses them, one whose plans form a
        family of its own returns the whole family's Pareto front.
        """
        raise NotImplementedError


@dataclass(frozen=True)
class FamilyStrategy(Strategy):
    """A strategy whose candidate plans do not depend on the budget.

    The best candidate under the budget is the plan, so that peak and overhead are monotone in the budget by
    construction, and the smallest reachable peak is the family's least.
    """

    def family(self, graph: TrainingGraph, progress: Progress = silent) -> Iterable[Plan]:
        """All candidate plans, unbudgeted, each priced by the simulator."""
        raise NotImplementedError

    def plan(
        self, graph: TrainingGraph, budget: int, progress: Progress = silent, starts: Sequence[Plan] = ()
    ) -> Plan:
        """See `Strategy.plan`. Starts are not used."""
        del starts
        found = self.around(graph, budget, progress)
        if found[0].estimate.peak > budget:
            raise InfeasibleBudget(self.name, budget, found[-1].estimate.peak, plan=found[-1])
        return replace(found[0], budget=budget)

    def around(self, graph: TrainingGraph, budget: int, progress: Progress = silent) -> tuple[Plan, ...]:
        """The cheapest plan within the budget, if there is one, and then the leanest of all, if that is another."""
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
        """See `Strategy.curve`. Budgets and starts are not used."""
        del budgets, starts
        return pareto(self.family(graph, progress))


def pareto(plans: Iterable[Plan]) -> tuple[Plan, ...]:
    """The plans that no other dominates, by rising overhead and falling peak; the first of equals is kept."""
    return tuple(undominated(plans, lambda p: (p.estimate.cost, p.estimate.peak)))


def undominated(rows: Iterable[Row], cost_and_peak: Callable[[Row], tuple[float, int]]) -> list[Row]:
    """The rows that no other beats in both figures, by rising cost and falling peak; the first of equals is kept."""
    front: list[Row] = []
    least = math.inf
    for row in sorted(rows, key=cost_and_peak):
        if (peak := cost_and_peak(row)[1]) < least:
            least = peak
            front.append(row)
    return front
