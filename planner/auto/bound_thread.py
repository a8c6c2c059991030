"""The search for a lower bound, beside the search for a plan: each ends when the other has closed the gap."""

from __future__ import annotations

import math
import threading
from types import TracebackType

from rematplan.planner.bounds.cut_bounds import CLOSED
from rematplan.planner.bounds.search import BoundSearch

LAST_WORDS = 0.5
"""Seconds that the search may take to end when told to: it may be writing a program down."""


class Proof:
    """A `BoundSearch` in a thread of its own, for as long as the context lasts.

    ``overhead``: of the best plan so far. The search ends when its bound is within ``gap`` of that. What it raises is
    raised at the end.
    """

    def __init__(self, bound: BoundSearch, seconds: float, gap: float = 0.0) -> None:
        self.bound, self.seconds, self.gap = bound, seconds, max(gap, CLOSED)
        self.overhead = math.inf
        self._fault: Exception | None = None
        self._thread = threading.Thread(target=self._work, daemon=True)

    def _work(self) -> None:
        try:
            self.bound.run(self.seconds, lambda floor: self.overhead <= floor + self.gap)
        except Exception as error:
            self._fault = error

    def __enter__(self) -> Proof:
        self._thread.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, _error: BaseException | None, _trace: TracebackType | None
    ) -> None:
        self.bound.stop()
        self._thread.join(LAST_WORDS)
        if self._fault is not None and kind is None:
            raise self._fault

    @property
    def working(self) -> bool:
        """Whether the bound's search has not ended yet."""
        return self._thread.is_alive()

    def finish(self, seconds: float) -> None:
        """Wait until the bound's search has ended of itself; it may work as long as this, in seconds."""
        self.bound.extend(seconds)
        self._thread.join(max(0.0, seconds))
