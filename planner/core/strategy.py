"""The interface of strategies: a strategy turns a problem and a budget into a plan."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from typing import ClassVar, Self, TypeAlias, TypeVar

from rematplan.ir import CHEAP, InfeasibleBudget, TrainingGraph
from rematplan.planner.core.plan import Plan, by_cost

Row = TypeVar("Row")
Progress: TypeAlias = Callable[[float, str], None]
"""A callback for long work: it receives the fraction done (0 to 1) and a short text.

Raising from it interrupts the work. If it raises `Enough`, the work returns the best result so far.
"""


class Enough(Exception):
    """Raised by a progress callback to make the work stop and return the best result so far."""


def silent(_fraction: float, _text: str) -> None:
    """A progress callback that does nothing."""


@dataclass(frozen=True)
class Strategy:
    """Base class of strategies: algorithms that choose a plan. The fields of a subclass are the strategy's options,
    also on the command line (``--objective time``).

    ``name``: the strategy's name on the command line, as in the literature. ``summary``: one line about it, for
    lists.
    """

    name: ClassVar[str]
    summary: ClassVar[str]
    resumes: ClassVar[bool] = False
    """Whether callers hand stored plans to ``plan`` and ``curve`` as ``starts``, from which the search then goes on."""

    @property
    def lasting(self) -> bool:
        """Whether this strategy's plans are worth saving on disk, as starts for searches in later processes."""
        return False

    def plan(
        self, graph: TrainingGraph, budget: int, progress: Progress = silent, starts: Sequence[Plan] = ()
    ) -> Plan:
        """Return the plan of least overhead that this strategy finds within ``budget`` bytes of simulated peak.

        Args:
            graph: the planning problem.
            budget: bytes that the simulated peak must not exceed.
            progress: called with the fraction done and a short text.
            starts: known plans of the problem, for any budgets, to start from. A strategy that does not search
                ignores them.

        Raises:
            InfeasibleBudget: the strategy finds no schedule that fits; the error states the smallest found peak.
        """
        raise NotImplementedError

    def curve(
        self,
        graph: TrainingGraph,
        budgets: Sequence[int],
        progress: Progress = silent,
        starts: Sequence[Plan] = (),
    ) -> tuple[Plan, ...]:
        """Return plans along the trade-off of memory and overhead, by falling peak and rising overhead. None is
        dominated: no other is at least as good in peak and overhead.

        A strategy that plans for one budget at a time plans for each of ``budgets`` (bytes). A strategy whose plans
        do not depend on the budget ignores ``budgets`` and returns the Pareto front of all its plans. ``progress``,
        ``starts``: as in `Strategy.plan`.
        """
        raise NotImplementedError


@dataclass(frozen=True)
class FamilyStrategy(Strategy):
    """Base class of strategies whose candidate plans do not depend on the budget.

    The plan for a budget is the cheapest candidate that fits. So overhead falls, and peak rises, with the budget,
    and the smallest peak of all candidates is the smallest budget that can be met.
    """

    def family(self, graph: TrainingGraph, progress: Progress = silent) -> Iterable[Plan]:
        """Yield all candidate plans. Their field ``budget`` is None."""
        raise NotImplementedError

    def plan(
        self, graph: TrainingGraph, budget: int, progress: Progress = silent, starts: Sequence[Plan] = ()
    ) -> Plan:
        """Return the cheapest candidate plan within ``budget`` bytes of simulated peak. ``starts`` is ignored.

        Raises:
            InfeasibleBudget: no candidate fits; the error states the smallest found peak and its plan.
        """
        del starts
        found = self.around(graph, budget, progress)
        if found[0].estimate.peak > budget:
            cheap = min(
                (p.estimate.peak for p in self.curve(graph, ()) if p.estimate.overhead <= CHEAP), default=0
            )
            raise InfeasibleBudget(self.name, budget, found[-1].estimate.peak, plan=found[-1], cheap=cheap)
        return replace(found[0], budget=budget)

    def around(self, graph: TrainingGraph, budget: int, progress: Progress = silent) -> tuple[Plan, ...]:
        """Return the cheapest candidate within ``budget`` bytes, then the candidate with the smallest peak.

        The tuple has one plan if both are the same, or if no candidate fits: then it is the one with the smallest
        peak.
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
        """Return the Pareto front of all candidates, by rising overhead and falling peak. ``budgets``, ``starts``
        are ignored."""
        del budgets, starts
        return pareto(self.family(graph, progress))


@dataclass(frozen=True)
class SearchStrategy(Strategy):
    """Base class of strategies that search for the plan of one budget, for up to ``time_limit`` seconds."""

    time_limit: float = 30.0

    carried: ClassVar[int] = 0
    """How many of the plans found last are starts for the next budget of a curve."""

    @property
    def lasting(self) -> bool:
        """True: plans are worth keeping on disk, as starts for later processes."""
        return True

    def share(self, count: int) -> Self:
        """Return this strategy with a ``count``-th of its time limit."""
        return replace(self, time_limit=self.time_limit / count)

    def curve(
        self,
        graph: TrainingGraph,
        budgets: Sequence[int],
        progress: Progress = silent,
        starts: Sequence[Plan] = (),
    ) -> tuple[Plan, ...]:
        """Return plans by falling peak and rising overhead, at most one for each of ``budgets`` (bytes).

        Budgets are planned from the largest to the smallest. After the first budget that no plan fits, smaller ones
        are skipped. The time limit is divided equally among the budgets. A plan that a plan for a smaller budget
        beats or equals is left out.
        """
        share = self.share(max(1, len(budgets)))
        plans: list[Plan] = []
        for k, budget in enumerate(sorted(set(budgets), reverse=True)):

            def report(fraction: float, text: str, k: int = k) -> None:
                progress((k + fraction) / len(budgets), text)

            last = plans[max(0, len(plans) - self.carried) :]
            try:
                plans.append(share.plan(graph, budget, report, (*starts, *last)))
            except InfeasibleBudget:
                break
        return pareto(plans)


def pareto(plans: Iterable[Plan]) -> tuple[Plan, ...]:
    """Return the plans that no other plan beats or equals in both cost and peak, by rising cost and falling peak. Of
    plans equal in both, the first is returned."""
    return tuple(undominated(plans, by_cost))


def undominated(rows: Iterable[Row], cost_and_peak: Callable[[Row], tuple[float, int]]) -> list[Row]:
    """Return the rows that no other row beats or equals in both cost and peak, by rising cost.

    ``cost_and_peak``: returns the two numbers of a row. Of rows equal in both, the first is returned.
    """
    front: list[Row] = []
    least = math.inf
    for row in sorted(rows, key=cost_and_peak):
        if (peak := cost_and_peak(row)[1]) < least:
            least = peak
            front.append(row)
    return front
