"""A second annealing with another seed.

Its thread starts when the search for the bound has ended and a core is free.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Sequence

from rematplan.planner.annealing.restarts import Search
from rematplan.planner.annealing.search_budget import SearchBudget
from rematplan.planner.auto.bound_thread import Proof

SHORTEST = 1.0
"""The second annealing starts only if this many seconds are left."""


class SecondSearch:
    """A thread, for the length of a ``with`` block, that runs a second annealing once the search for the lower bound
    has ended.

    ``search``: the annealing; it holds the plans found. ``proof``: the search for the bound. ``until``: a time of
    the monotonic clock at which the annealing ends; it does not begin within the last second before. ``starts``:
    sequences of runs to start from.
    """

    def __init__(self, search: Search, proof: Proof, until: float, starts: Sequence[Sequence[str]]) -> None:
        self.search, self.proof, self.until, self.starts = search, proof, until, starts
        self.effort: SearchBudget | None = None
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
        while self.proof.working:
            if self._stopped.wait(0.1):
                return
        left = self.until - time.monotonic()
        if left > SHORTEST:
            self.effort = SearchBudget(left)
            if not self._stopped.is_set():  # `__exit__` cannot stop an effort that did not exist yet
                self.search.run(self.starts, self.effort)
