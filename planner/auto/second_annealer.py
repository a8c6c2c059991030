"""A second annealing with another seed, in a thread, from when the bound's search has ended and left a core idle."""

from __future__ import annotations

import threading
import time
from collections.abc import Sequence

from rematplan.planner.annealing.restarts import Search, SearchBudget
from rematplan.planner.auto.bound_thread import Proof

SHORTEST = 1.0
"""Seconds that must be left for it to begin."""


class SecondSearch:
    """``search`` run beside another one, for as long as the context lasts and at most until a time of the monotonic
    clock, from ``starts``. What it has found by the end stands in ``search``."""

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
            if not self._stopped.is_set():  # or else it was stopped before there was an effort to stop
                self.search.run(self.starts, self.effort)
