"""Anneal: simulated annealing of the whole sequence of runs. It works on any DAG and recomputes any op any number
of times."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import ClassVar, Self

from rematplan.ir import TrainingGraph
from rematplan.planner.annealing.cheap_plan import CHEAP_SHARE, refusal
from rematplan.planner.annealing.problem_arrays import recipes
from rematplan.planner.annealing.restarts import Search
from rematplan.planner.annealing.search_budget import SearchBudget
from rematplan.planner.core.plan import Plan
from rematplan.planner.core.schedule import runs_of
from rematplan.planner.core.strategy import Progress, SearchStrategy, silent


@dataclass(frozen=True)
class Anneal(SearchStrategy):
    """Simulated annealing of the sequence of runs: runs are moved, added and removed at random (see
    `planner.annealing.moves`).

    Ctrl-C returns the best plan so far. There is no guarantee; the lower bound of `Auto` tells how far a plan is
    from optimal.

    Options: ``time_limit``: seconds. ``seed``: of the random choices. ``keep_order``: whether the first runs of all
    ops keep the problem's order. ``moves``: if not 0, the number of moves, instead of the time limit; the plan is
    then the same on every machine.
    """

    seed: int = 0
    keep_order: bool = False
    moves: int = 0

    name: ClassVar[str] = "anneal"
    summary: ClassVar[str] = "anneal the sequence of ops, each recomputed where and as often as it pays"

    carried: ClassVar[int] = 2

    def share(self, count: int) -> Self:
        """Return this strategy with a ``count``-th of its time limit and of its moves."""
        return replace(super().share(count), moves=self.moves // count)

    def plan(
        self, graph: TrainingGraph, budget: int, progress: Progress = silent, starts: Sequence[Plan] = ()
    ) -> Plan:
        """Return the best plan found within ``budget`` bytes. It is never worse than a start that fits (and keeps
        the problem's order, if ``keep_order`` is set).

        Raises:
            InfeasibleBudget: no plan was found that fits; the error states the smallest found peak.
        """
        floor = _floor(graph)
        search = Search(
            graph,
            budget,
            self.seed,
            self.keep_order,
            enough=lambda overhead: overhead <= floor + 1e-12,
            report=lambda fraction, overhead: progress(fraction, _text(overhead)),
        )
        plan = search.run([runs_of(p.schedule) for p in starts], SearchBudget(self.time_limit, self.moves))
        if plan is None:
            least, effort = search.least, SearchBudget(CHEAP_SHARE * self.time_limit, self.moves // 20)
            raise refusal(self.name, graph, budget, least, effort, seed=self.seed, keep_order=self.keep_order)
        return plan


def _floor(graph: TrainingGraph) -> float:
    """Return the overhead of running once each op that must run."""
    known = recipes(graph)
    least = sum(op.cost for op, runs in zip(known.rows, known.least, strict=True) if runs)
    return least / graph.base_cost - 1 if graph.base_cost else 0.0


def _text(overhead: float | None) -> str:
    return "nothing fits yet" if overhead is None else f"overhead {100 * overhead:.2f} %"
