"""A second annealing in a thread, after the search for a bound, because a core is free then."""

from __future__ import annotations

import threading
from collections.abc import Sequence

from rematplan.planner.annealing.annealing_search import Search
from rematplan.planner.auto.bound_thread import BoundThread
from rematplan.planner.core.effort import Effort

SHORTEST = 1.0
"""The second annealing begins only if more than this many seconds are left."""


class SecondSearch:
    """A context in which a thread waits for the search for a bound, then anneals until the block ends. The search for a
    bound and the annealing share ``seconds``, in CPU seconds from the beginning of the block. If at most `SHORTEST` are
    left, it does not anneal."""

    def __init__(
        self, search: Search, bound_thread: BoundThread, seconds: float, starts: Sequence[Sequence[str]]
    ) -> None:
        self.search, self.bound_thread, self.seconds, self.starts = search, bound_thread, seconds, starts
        self.effort: Effort | None = None
        self._stopped = threading.Event()
        self._thread = threading.Thread(target=self._work, daemon=True)

    def __enter__(self) -> SecondSearch:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._stopped.set()
        if self.effort is not None:
            self.effort.stop()
        self._thread.join()

    def _work(self) -> None:
        """Wait until the search for a bound ends, then anneal for the seconds left. End as soon as the block has
        ended."""
        began = self.bound_thread.spent
        while self.bound_thread.working:
            if self._stopped.wait(0.1):
                return
        left = self.seconds - (self.bound_thread.spent - began)
        if left > SHORTEST:
            self.effort = Effort(left)
            if not self._stopped.is_set():  # `__exit__` cannot stop an effort that did not exist yet
                self.search.run(self.starts, self.effort)
