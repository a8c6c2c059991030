"""A plan that is improved in another process while training runs."""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

from rematplan.ir import TrainingGraph, show_bytes
from rematplan.planner.background import shared
from rematplan.planner.caches.plan_store import PlanStore
from rematplan.planner.core.plan import Plan
from rematplan.runtime.problem.accumulation import StepPlan

LOG = logging.getLogger("rematplan")


@dataclass(frozen=True)
class Wanted:
    """What is searched for in the background.

    ``plan``: the plan that training begins with. ``options``: of the strategy ``strategy``. ``gap``: a plan whose
    overhead is proven to be within this of the optimum's ends the search. ``starts``: plans that are known from other
    sizes.
    """

    problem: TrainingGraph
    budget: int
    plan: Plan
    strategy: str
    options: Mapping[str, object]
    gap: float
    starts: tuple[Plan, ...] = ()


@dataclass(eq=False)
class Refining:
    """The search for a better plan of one step, and what it has found; see `accumulation.Refinement`.

    ``finish``: makes of a plan what a step is run with; None where that would not keep the budget. ``store``: gets each
    plan that is better.
    """

    wanted: Wanted
    finish: Callable[[Plan], StepPlan | None]
    store: PlanStore
    seconds: float = 0.0
    _found: tuple[StepPlan, Any] | None = None
    _best: float = field(init=False)
    _ended: threading.Event = field(default_factory=threading.Event)

    def __post_init__(self) -> None:
        self._best = self.wanted.plan.estimate.cost

    def mapped(self, change: Callable[[StepPlan], StepPlan | None]) -> Refining:
        """The same, where what a step is run with is changed; see ``finish``."""
        first = self.finish

        def both(plan: Plan) -> StepPlan | None:
            found = first(plan)
            return None if found is None else change(found)

        return Refining(self.wanted, both, self.store)

    def begin(self, compiled: Callable[[StepPlan], Any]) -> None:
        """See `Refinement.begin`."""
        wanted, began = self.wanted, time.monotonic()

        def heard(plan: Plan | None, ended: bool) -> None:
            self.seconds = time.monotonic() - began
            if plan is not None:
                self._take_in(plan, compiled)
            if ended:
                self._ended.set()

        starts = [wanted.plan, *wanted.starts]
        if not shared().submit(
            wanted.problem, wanted.budget, wanted.strategy, wanted.options, starts, wanted.gap, heard
        ):
            self._ended.set()

    def _take_in(self, plan: Plan, compiled: Callable[[StepPlan], Any]) -> None:
        self.store.put(self.wanted.problem, self.wanted.budget, plan)
        if plan.estimate.cost >= self._best:
            return
        found = self.finish(plan)
        if found is None:
            return
        self._found, self._best = (found, compiled(found)), plan.estimate.cost
        LOG.info(
            "a better plan of %s after %.1f s: overhead %.2f %%, peak %s, %s",
            plan.problem,
            self.seconds,
            100 * plan.estimate.overhead,
            show_bytes(plan.peak),
            "no bound" if plan.gap is None else f"gap {100 * plan.gap:.2f} points",
        )

    @property
    def ready(self) -> bool:
        """See `Refinement.ready`."""
        return self._found is not None

    def take(self) -> tuple[StepPlan, Any]:
        """See `Refinement.take`."""
        found, self._found = self._found, None
        assert found is not None
        return found

    @property
    def working(self) -> bool:
        """See `Refinement.working`."""
        return not self._ended.is_set()

    def wait(self, seconds: float | None = None) -> bool:
        """See `Refinement.wait`."""
        return self._ended.wait(seconds)


def mapped(found: StepPlan, change: Callable[[StepPlan], StepPlan | None]) -> StepPlan | None:
    """A step's plan after a change that its later plans undergo too; None where the change makes nothing of it."""
    changed = change(found)
    if changed is None or found.refinement is None:
        return changed
    assert isinstance(found.refinement, Refining)
    return replace(changed, refinement=found.refinement.mapped(change))
