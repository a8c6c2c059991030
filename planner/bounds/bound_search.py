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
    """A search for a proven lower bound of the overhead at one budget. The overhead is the extra time of a schedule,
    as a fraction of the time without recomputation.

    ``best`` is the best bound so far. Another thread may read it and may call `stop`.

    The bounds come from *cuts*. A cut at an op is the constraint that the bytes resident at the op's first execution
    fit the budget: a tensor that is not resident then must be computed later if it is read later. First, a maximum
    flow bounds each of a few cuts alone (with inverses, a linear relaxation does). Then cuts are added to the best
    one, and integer programs for the set prove higher bounds.
    """

    def run(self, effort: Effort, enough: Callable[[float], bool] = lambda _: False) -> Bound:
        """Search until ``effort`` is spent. Return the best bound proven, which is also in ``best``.

        ``enough``: the search ends when it returns True. It is called repeatedly, with the overhead that is proven so
        far (a fraction).
        """
        with Solver() as self._solver:
            Growth(self, effort, enough).run()
        return self.best


def lower_bound(graph: TrainingGraph, budget: int, time_limit: float = 10.0) -> Bound:
    """Return a proven lower bound of the overhead of all schedules whose peak is at most ``budget`` bytes.

    ``time_limit``: CPU seconds for the search. The bound is never below the overhead of running only the ops that every
    schedule must run, each once.
    """
    return BoundSearch(graph, budget).run(Effort(time_limit))
