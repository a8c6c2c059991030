"""Search for the best lower bound of the overhead at one budget that can be proven within a time limit. The proofs
are in docs/lower-bound.md."""

from __future__ import annotations

from collections.abc import Callable

from rematplan.ir import TrainingGraph
from rematplan.planner.bounds.cut_bounds import Bound, CutBounds
from rematplan.planner.bounds.cut_growth import Growth
from rematplan.planner.core.effort import Effort
from rematplan.planner.ilp.solver import Solver


class BoundSearch(CutBounds):
    """A search for a proven lower bound of the overhead at one budget. Other threads may read ``best`` and
    call `stop`.
    """

    def run(self, effort: Effort, enough: Callable[[float], bool] = lambda _: False) -> Bound:
        """Search until ``effort`` is spent or ``enough(overhead proven so far)`` returns True. Return the
        best bound, also in ``best``.
        """
        with Solver() as self._solver:
            Growth(self, effort, enough).run()
        return self.best


def lower_bound(graph: TrainingGraph, budget: int, time_limit: float = 10.0) -> Bound:
    """Return a proven lower bound of the overhead of all schedules within ``budget`` bytes. ``time_limit``:
    CPU seconds.
    """
    # It is at least the overhead of the ops that every schedule must run, each once.
    return BoundSearch(graph, budget).run(Effort(time_limit))
