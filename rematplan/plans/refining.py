"""Refine a plan in another process while training runs."""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

from rematplan.ir import TrainingGraph
from rematplan.planner.background import shared
from rematplan.planner.caches.plan_store import PlanStore
from rematplan.planner.core.plan import Plan
from rematplan.runtime.problem.accumulation import StepPlan

LOG = logging.getLogger("rematplan")


@dataclass(frozen=True)
class Wanted:
    """A search for a better plan that another process shall make.

    ``problem``: the planning problem of the step. ``shapes``: the types and shapes of the batch, as text. ``budget``:
    bytes. ``plan``: the plan with which training starts. ``strategy``, ``options``: the name of the strategy that
    searches, and its options. ``starts``: plans of the same step at other sizes, from which the search starts in
    addition to ``plan``.
    """

    problem: TrainingGraph
    shapes: str
    budget: int
    plan: Plan
    strategy: str
    options: Mapping[str, object]
    starts: tuple[Plan, ...] = ()


@dataclass(eq=False)
class Refining:
    """The search, in another process, for a better plan of one step. It implements `accumulation.Refinement`.

    ``wanted``: the search. ``finish``: makes the step's plan of a plan that was found; returns None if that would
    exceed the budget. ``store``: receives every plan that is found. ``seconds``: how long the search has taken so far.
    ``floor``: the largest lower bound on the overhead that it has proven, as a share of the step's time; None if none
    yet.
    """

    wanted: Wanted
    finish: Callable[[Plan], StepPlan | None]
    store: PlanStore
    seconds: float = 0.0
    floor: float | None = None
    _found: tuple[StepPlan, Any] | None = None
    _best: float = field(init=False)
    _ended: threading.Event = field(default_factory=threading.Event)

    def __post_init__(self) -> None:
        self._best = self.wanted.plan.estimate.cost

    def mapped(self, change: Callable[[StepPlan], StepPlan | None]) -> Refining:
        """Return a copy, not begun, whose results are changed by ``change``. A result for which ``change`` returns None
        is dropped."""
        first = self.finish

        def both(plan: Plan) -> StepPlan | None:
            found = first(plan)
            return None if found is None else change(found)

        return Refining(self.wanted, both, self.store)

    def begin(self, compiled: Callable[[StepPlan], Any]) -> None:
        """Start the search in another process, and return at once.

        ``compiled``: compiles a plan that is better than all before. It is called in another thread; `take` returns
        what ``compiled`` returned.
        """
        wanted, began = self.wanted, time.monotonic()

        def heard(plan: Plan | None, ended: bool) -> None:
            self.seconds = time.monotonic() - began
            if plan is not None:
                self._take_in(plan, compiled)
            if ended:
                self._ended.set()
                text = "the search for better plans of %s for %s ended after %.1f s"
                LOG.info(text, wanted.problem.name, wanted.shapes, self.seconds)

        starts = [wanted.plan, *wanted.starts]
        if not shared().submit(wanted.problem, wanted.budget, wanted.strategy, wanted.options, starts, heard):
            self._ended.set()

    def _take_in(self, plan: Plan, compiled: Callable[[StepPlan], Any]) -> None:
        self.store.put(self.wanted.problem, self.wanted.budget, plan)
        if plan.lower_bound is not None:
            self.floor = plan.lower_bound if self.floor is None else max(self.floor, plan.lower_bound)
        if plan.estimate.cost >= self._best:
            return
        found = self.finish(plan)
        if found is None:
            return
        self._found, self._best = (found, compiled(found)), plan.estimate.cost
        LOG.info("after %.1f s a better %s; for %s", self.seconds, plan, self.wanted.shapes)

    @property
    def ready(self) -> bool:
        """Whether a better plan has been found that `take` has not returned yet."""
        return self._found is not None

    def take(self) -> tuple[StepPlan, Any]:
        """Return the best plan found since the last call, and its compiled form. Call it only if `ready` is true."""
        found, self._found = self._found, None
        assert found is not None
        return found

    @property
    def working(self) -> bool:
        """Whether the search in the other process is still running."""
        return not self._ended.is_set()

    def wait(self, seconds: float | None = None) -> bool:
        """Wait until the search ends, for at most ``seconds`` (None: without a limit). Return whether the search has
        ended."""
        return self._ended.wait(seconds)


def mapped(found: StepPlan, change: Callable[[StepPlan], StepPlan | None]) -> StepPlan | None:
    """Return ``change(found)``; ``change`` is also applied to every better plan that the background search finds later.

    None if ``change(found)`` is None.
    """
    changed = change(found)
    if changed is None or found.refinement is None:
        return changed
    assert isinstance(found.refinement, Refining)
    return replace(changed, refinement=found.refinement.mapped(change))
