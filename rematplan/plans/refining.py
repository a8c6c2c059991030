"""Search for better plans in another process while training runs."""

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
    """A search for a better plan that another process makes: the problem, the options, and the plans to start from.

    ``problem``: the planning problem of the step. ``shapes``: the types and shapes of the batch, as text for log
    messages. ``budget``: bytes. ``plan``: the plan with which training starts. ``strategy``, ``options``: the name
    of the planning algorithm, and its options. ``starts``: plans of the same step at other sizes, from which the
    search starts in addition to ``plan``.
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
    """A search for a better plan of a step, in another process while training runs. It implements
    `accumulation.Refinement`.

    ``wanted``: what is searched for. ``finish``: a function of each better plan that makes the `StepPlan` (the plan
    with its captured step), or returns None to drop the plan. ``store``: receives every plan that the search finds.
    ``seconds``: how long the search has taken so far. ``floor``: the largest proven lower bound on the overhead of
    any plan so far, as a share of the step's time without recomputation; None if none yet.
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
        """Return the same search, not begun, with ``change`` applied to every plan that it finds. If ``change``
        returns None, the plan is dropped."""
        first = self.finish

        def both(plan: Plan) -> StepPlan | None:
            found = first(plan)
            return None if found is None else change(found)

        return Refining(self.wanted, both, self.store)

    def begin(self, compiled: Callable[[StepPlan], Any]) -> None:
        """Start the search in another process, and return at once.

        ``compiled``: compiles a plan. It is called in another thread of this process, with each plan that costs less
        than all before it. `take` returns its latest result.
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
        """Whether a better plan was found and compiled that `take` has not returned yet."""
        return self._found is not None

    def take(self) -> tuple[StepPlan, Any]:
        """Return the best plan that was found since the last call, and what compiling it returned. Call it only if
        `ready` is true."""
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
    """Apply ``change`` to a plan, and to every better plan that its background search finds later. Return the
    changed plan.

    ``found``: a plan with its captured step, and perhaps a search for better plans that has not begun. The result is
    None if ``change`` returns None for ``found``. A better plan for which it returns None is dropped.
    """
    changed = change(found)
    if changed is None or found.refinement is None:
        return changed
    assert isinstance(found.refinement, Refining)
    return replace(changed, refinement=found.refinement.mapped(change))
