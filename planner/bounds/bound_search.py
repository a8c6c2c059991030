"""Search for the best proven lower bound of the overhead at one budget. The proofs are in docs/lower-bound.md."""

from __future__ import annotations

from collections.abc import Callable

from rematplan.ir import TrainingGraph
from rematplan.planner.bounds.cut_bounds import Bound, CutBounds
from rematplan.planner.bounds.cut_growth import Growth
from rematplan.planner.ilp.solver import Solver


class BoundSearch(CutBounds):
    """The search for a lower bound at one budget. Another thread may read its result and stop it.

    First each of a few places is cut alone and bounded by maximum flows. A set of cuts then grows from the best of
    them (`cut_growth`).
    """

    _growth: Growth | None = None

    def run(self, time_limit: float, enough: Callable[[float], bool] = lambda _: False) -> Bound:
        """Search for up to ``time_limit`` seconds. Returns the best bound, and keeps it in ``best``.

        ``enough``: called between programs with the bound so far; returning True ends the search.
        """
        with Solver() as self._solver:
            self._growth = Growth(self, time_limit, enough)
            self._growth.run()
        return self.best

    def extend(self, seconds: float) -> None:
        """Let a search that has begun and not ended work for ``seconds`` from now on."""
        if self._growth is not None:
            self._growth.time_limit = self._growth.spent + seconds


def lower_bound(graph: TrainingGraph, budget: int, time_limit: float = 10.0) -> Bound:
    """Return a proven lower bound of the overhead of any schedule whose peak is within ``budget`` bytes.

    ``time_limit``: seconds for the search.
    """
    return BoundSearch(graph, budget).run(time_limit)
