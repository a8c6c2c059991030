"""A thread that searches for a lower bound while plans are searched for. Each search ends when the gap is closed."""

from __future__ import annotations

import math
import threading
from types import TracebackType

from rematplan.planner.bounds.bound_search import BoundSearch
from rematplan.planner.bounds.cut_bounds import CLOSED

LAST_WORDS = 0.5
"""Seconds to wait for the search for a bound to end after it was stopped; a program being written delays it."""


class Proof:
    """A thread that searches for a lower bound of the overhead, for the length of a ``with`` block.

    ``bound``: the search. ``seconds``: its time limit. ``gap``: the search ends when its bound is within this
    overhead of ``overhead``. ``overhead``: the overhead of the best plan so far, infinite at first; the code in the
    block updates it. An exception of the search is raised at the end of the block, unless the block itself raised
    one.
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
        """Whether the search for the bound is still running."""
        return self._thread.is_alive()

    def finish(self, seconds: float) -> None:
        """Give the search for the bound ``seconds`` more from now on, and wait until it ends or they are over."""
        self.bound.extend(seconds)
        self._thread.join(max(0.0, seconds))
