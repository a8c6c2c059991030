"""A thread that searches for a lower bound of the overhead, until the best plan is near enough to it."""

from __future__ import annotations

import math
import threading
from types import TracebackType

from rematplan.planner.bounds.bound_search import BoundSearch
from rematplan.planner.core.effort import PATIENCE, Effort
from rematplan.planner.core.plan import CLOSED

LAST_WORDS = 0.5
"""Seconds to wait for the thread after its search was stopped. A search that is just writing an integer program ends
later."""


class BoundThread:
    """A context in which a thread searches for a lower bound of the overhead. The block must keep ``overhead`` at its
    best plan's overhead. The search ends with the block, or once its bound is at most ``gap`` below ``overhead``. With
    counted moves the block begins after the search. The thread's exception is raised at the end of the block, unless
    the block raises one."""

    def __init__(self, bound: BoundSearch, effort: Effort, gap: float = 0.0) -> None:
        self.bound, self.effort, self.gap = bound, effort, max(gap, CLOSED)
        self.spent = 0.0
        self.overhead = math.inf
        self._fault: Exception | None = None
        self._thread = threading.Thread(target=self._work, daemon=True)

    def _work(self) -> None:
        try:
            self.effort.begin()
            self.bound.run(self.effort, self._is_enough)
        except Exception as error:
            self._fault = error

    def _is_enough(self, floor: float) -> bool:
        self.spent = self.effort.spent()
        return self.overhead <= floor + self.gap

    def __enter__(self) -> BoundThread:
        self._thread.start()
        if self.effort.moves:
            self._thread.join()
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
        """Whether the thread that searches for a lower bound is still running."""
        return self._thread.is_alive()

    def finish(self, seconds: float) -> None:
        """Let the search for a lower bound go on for up to ``seconds`` from now, whatever its limit was. Wait for its
        end, but at most `PATIENCE` times as long."""
        self.effort.extend(seconds)
        self._thread.join(PATIENCE * seconds)
