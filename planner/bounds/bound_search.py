"""Search for the best proven lower bound of the overhead at one budget. The proofs are in docs/lower-bound.md."""

from __future__ import annotations

from collections.abc import Callable

from rematplan.ir import TrainingGraph
from rematplan.planner.bounds.cut_bounds import Bound, CutBounds
from rematplan.planner.bounds.cut_growth import Growth
from rematplan.planner.ilp.solver import Solver


class BoundSearch(CutBounds):
    """The search for a lower bound of the overhead at one budget. Another thread may read its result ``best`` and
    stop it.

    A *cut* at an op states that what is resident at the op's first run fits the budget; what is not must be computed
    later. First, maximum flows bound single cuts at a few ops. From the best of them a set of cuts grows, whose
    integer programs prove more.
    """

    _growth: Growth | None = None

    def run(self, time_limit: float, enough: Callable[[float], bool] = lambda _: False) -> Bound:
        """Search for up to ``time_limit`` seconds. Return the best bound proven, which is also in ``best``.

        ``enough``: called between programs with the overhead that is proven so far; returning True ends the search.
        """
        with Solver() as self._solver:
            self._growth = Growth(self, time_limit, enough)
            self._growth.run()
        return self.best

    def extend(self, seconds: float) -> None:
        """Allow a search that is running to go on for ``seconds`` from now on. Nothing happens before `run` has
        begun."""
        if self._growth is not None:
            self._growth.time_limit = self._growth.spent + seconds


def lower_bound(graph: TrainingGraph, budget: int, time_limit: float = 10.0) -> Bound:
    """Return a proven lower bound of the overhead of any schedule whose peak is within ``budget`` bytes.

    ``time_limit``: seconds for the search. Without a better proof, it is the overhead of running once each op that
    every schedule must run.
    """
    return BoundSearch(graph, budget).run(time_limit)
