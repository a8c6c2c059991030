"""Replace a plan that was found at other sizes when a better plan becomes known, whatever the sizes at which it was
found."""

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
"""The largest number of background searches at a time for problems of one structure (ops and tensors, without
sizes). The plans that they find can be used at all sizes."""
GAIN = 1e-6
"""A plan counts as better if it is cheaper than the present plan by more than this share of the present plan's cost."""


@dataclass(eq=False)
class Rechoosing:
    """A search for a better plan of a step at certain sizes. It implements `accumulation.Refinement`.

    A better plan may come from a search in another process at these sizes, or from a search at other sizes: all
    plans join the same family, and the family is evaluated again whenever it has new plans.

    ``plan``: the plan in use. ``best``: returns the best plan of the family at these sizes, or None. ``finish``:
    makes a `StepPlan` (a plan with its captured step) of a plan. ``family``: the known plans for all sizes.
    ``search``: a function that returns a search in another process at these sizes, or None if no search is needed;
    None if the options exclude searches. ``searches``: the running searches at all sizes, shared by the objects of
    one family.
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
        """Begin a search in another process, unless `SEARCHES` are running. The planning problem for the search is
        made in another thread.

        ``compiled``: compiles a plan. `take` calls it.
        """
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
        """Whether a plan is known that is better at these sizes than the plan in use. New plans of the family are
        evaluated here."""
        members = self.family.members
        if self._better is None and members is not self._seen:
            self._seen, found = members, self.best()
            if found is not None and found.estimate.cost < (1 - GAIN) * self.plan.estimate.cost:
                self._better = found
        return self._better is not None

    def take(self) -> tuple[StepPlan, Any]:
        """Put the better plan in use. Return it, and what the function passed to `begin` returns for it.

        Call it only if `ready` is true.
        """
        assert self._better is not None
        self.plan, self._better = self._better, None
        found = self.finish(self.plan)
        return found, self._compiled(found)

    @property
    def working(self) -> bool:
        """Whether the search at these sizes, if there is one, is still being prepared or running."""
        return not self._begun.is_set() or (self._own is not None and self._own.working)

    def wait(self, seconds: float | None = None) -> bool:
        """Wait until the search at these sizes has ended, at most ``seconds`` (None: without limit).

        Return whether it has ended.
        """
        began = time.monotonic()
        if not self._begun.wait(seconds):
            return False
        left = None if seconds is None else max(0.0, seconds - (time.monotonic() - began))
        return self._own is None or self._own.wait(left)

    @property
    def seconds(self) -> float:
        """How long the search at these sizes has taken, in seconds; 0 without a search."""
        return 0.0 if self._own is None else self._own.seconds

    @property
    def floor(self) -> float | None:
        """The largest lower bound on the overhead of any plan that the search at these sizes has proven; None if
        there is none."""
        return None if self._own is None else self._own.floor
