"""The search for the best proven floor of the overhead at one budget. docs/lower-bound.md has the proofs."""

from __future__ import annotations

from collections.abc import Callable

from rematplan.ir import TrainingGraph
from rematplan.planner.bounds.cut_bounds import Bound, CutBounds
from rematplan.planner.bounds.cut_growth import Growth
from rematplan.planner.ilp.solver import Solver


class BoundSearch(CutBounds):
    """The search for a bound at one budget; it can be asked, and told to stop, from another thread.

    First each of a few places is cut on its own, and maximum flows bound it; from the best of them a set of cuts grows
    (`cut_growth`).
    """

    _growth: Growth | None = None

    def run(self, time_limit: float, enough: Callable[[float], bool] = lambda _: False) -> Bound:
        """Work for up to ``time_limit`` seconds; returns, and keeps, the best bound.

        ``enough``: asked between programs with the bound so far; True ends the search.
        """
        with Solver() as self._solver:
            self._growth = Growth(self, time_limit, enough)
            self._growth.run()
        return self.best

    def extend(self, seconds: float) -> None:
        """Have a search that has not ended yet work for so many seconds from now."""
        if self._growth is not None:
            self._growth.time_limit = self._growth.spent + seconds


def lower_bound(graph: TrainingGraph, budget: int, time_limit: float = 10.0) -> Bound:
    """A proven floor of the overhead of any schedule of the problem whose peak is within ``budget`` bytes."""
    return BoundSearch(graph, budget).run(time_limit)
