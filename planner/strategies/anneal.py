"""The strategy `anneal`: simulated annealing of the order of execution, repeats included, on any DAG."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import ClassVar, Self

from rematplan.ir import TrainingGraph
from rematplan.planner.annealing.annealer import compile_annealer
from rematplan.planner.annealing.annealing_search import Search
from rematplan.planner.annealing.cheap_plan import CHEAP_SHARE, refusal
from rematplan.planner.annealing.problem_arrays import recipes
from rematplan.planner.core.effort import Effort
from rematplan.planner.core.plan import Plan
from rematplan.planner.core.schedule import runs_of
from rematplan.planner.core.search_rules import rules_of
from rematplan.planner.core.strategy import Progress, SearchStrategy, silent


@dataclass(frozen=True)
class Anneal(SearchStrategy):
    """Simulated annealing of the order in which ops are executed: executions of ops are moved, added and removed at
    random (see `planner.annealing.anneal_loop`).

    On Ctrl-C the best plan so far is returned. Annealing proves nothing about a plan; the strategy `auto` also computes
    a lower bound.

    Options: ``time_limit``: seconds. ``seed``: of the random choices. ``keep_order``: whether the first executions of
    all ops keep the problem's order. ``moves``: if not 0, the number of random changes to try instead of the time
    limit; the plan is then the same on every machine.
    """

    seed: int = 0
    keep_order: bool = False
    moves: int = 0

    name: ClassVar[str] = "anneal"
    summary: ClassVar[str] = "anneal the sequence of ops, each recomputed where and as often as it pays"

    carried: ClassVar[int] = 2

    @property
    def lasting(self) -> bool:
        """Whether plans are saved on disk, as starts for searches in later processes. False if the search is limited in
        moves, because its result must not depend on plans that earlier processes found."""
        return not self.moves

    @property
    def counted(self) -> int:
        """The number of moves that limits the search; 0 if its time does."""
        return self.moves

    def share(self, count: int) -> Self:
        """Return this strategy with its time limit and its number of moves divided by ``count``, moves rounded up."""
        return replace(super().share(count), moves=-(-self.moves // count))

    def plan(
        self, graph: TrainingGraph, budget: int, progress: Progress = silent, starts: Sequence[Plan] = ()
    ) -> Plan:
        """Return the plan of least overhead found within ``budget`` bytes; arguments and errors are those of
        `Strategy.plan`.

        It is at least as good as each of ``starts`` that fits and is a start by `Annealer.accepts`. With
        ``keep_order``, first executions keep the problem's order.
        """
        compile_annealer()  # before the clock starts
        floor, effort = _floor(graph), Effort(self.time_limit, self.moves)
        search = Search(
            graph,
            budget,
            *rules_of(self),
            enough=lambda overhead: overhead <= floor + 1e-12,
            report=lambda fraction, overhead: progress(fraction, _text(overhead)),
        )
        plan = search.run([runs_of(p.schedule) for p in starts], effort)
        if plan is None:
            more = effort.like(CHEAP_SHARE)
            raise refusal(self.name, graph, budget, search.least, more, rules=rules_of(self))
        return plan


def _floor(graph: TrainingGraph) -> float:
    """Return the overhead of executing once each op that every plan must execute; below 0 if some ops are not
    needed.
    """
    known = recipes(graph)
    least = sum(op.cost for op, runs in zip(known.rows, known.least, strict=True) if runs)
    return least / graph.base_cost - 1 if graph.base_cost else 0.0


def _text(overhead: float | None) -> str:
    return "nothing fits yet" if overhead is None else f"overhead {100 * overhead:.2f} %"
