"""A plan that was carried over to other sizes, and is replaced when a better one becomes known for any size."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from rematplan.planner.core.plan import Plan
from rematplan.planner.family.plan_family import PlanFamily
from rematplan.runtime.problem.accumulation import Refinement, StepPlan

SEARCHES = 2
"""The number of searches that run at a time for plans of one structure. Plans that they find serve all sizes."""
GAIN = 1e-6
"""The share of the cost by which a better plan is cheaper."""


@dataclass(eq=False)
class Rechoosing:
    """A search for a better plan at certain sizes, in other processes and among the plans of other sizes; an
    implementation of `accumulation.Refinement`.

    ``plan``: the plan in use. ``best``: returns the best known plan. ``finish``: returns a step's plan for it.
    ``family``: the known plans. ``search``: returns a search for these sizes, or None; None if nothing is searched.
    ``searches``: all such searches of this structure.
    """

    plan: Plan
    best: Callable[[], Plan | None]
    finish: Callable[[Plan], StepPlan]
    family: PlanFamily
    search: Callable[[], Refinement | None] | None
    searches: list[Refinement]
    _compiled: Callable[[StepPlan], Any] = field(init=False)
    _seen: object = None
    _better: Plan | None = None
    _own: Refinement | None = None
    _begun: threading.Event = field(default_factory=threading.Event)

    def begin(self, compiled: Callable[[StepPlan], Any]) -> None:
        """Begin a search, if not too many are running. Its problem is made in another thread."""
        self._compiled, self._seen = compiled, self.family.members
        self.searches[:] = [one for one in self.searches if one.working]
        if self.search is None or len(self.searches) >= SEARCHES:
            self._begun.set()
            return
        self.searches.append(self)
        threading.Thread(target=self._search, args=(self.search,), daemon=True).start()

    def _search(self, search: Callable[[], Refinement | None]) -> None:
        try:
            self._own = search()
            if self._own is not None:
                self._own.begin(lambda _found: None)  # its plans join the family
        finally:
            self._begun.set()

    @property
    def ready(self) -> bool:
        """Whether a better plan is known than the one in use."""
        members = self.family.members
        if self._better is None and members is not self._seen:
            self._seen, found = members, self.best()
            if found is not None and found.estimate.cost < (1 - GAIN) * self.plan.estimate.cost:
                self._better = found
        return self._better is not None

    def take(self) -> tuple[StepPlan, Any]:
        """Return the better plan, and what the function passed to `begin` returns for it. Call it if `ready`."""
        assert self._better is not None
        self.plan, self._better = self._better, None
        found = self.finish(self.plan)
        return found, self._compiled(found)

    @property
    def working(self) -> bool:
        """Whether the search for these sizes is running."""
        return not self._begun.is_set() or (self._own is not None and self._own.working)

    def wait(self, seconds: float | None = None) -> bool:
        """Wait until that search has ended, at most ``seconds``. Return whether it has ended."""
        began = time.monotonic()
        if not self._begun.wait(seconds):
            return False
        left = None if seconds is None else max(0.0, seconds - (time.monotonic() - began))
        return self._own is None or self._own.wait(left)

    @property
    def seconds(self) -> float:
        """The duration of that search."""
        return 0.0 if self._own is None else self._own.seconds

    @property
    def floor(self) -> float | None:
        """The largest lower bound of the overhead that it has proved."""
        return None if self._own is None else self._own.floor
