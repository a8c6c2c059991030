"""A plan together with its step (`StepPlan`), and searches for a better one while training runs: in another process
(`Refining`), or among plans found at other sizes (`Rechoosing`)."""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass, field, replace
from typing import Any, TypeAlias

from rematplan.ir import TrainingGraph
from rematplan.planner.auto.auto_strategy import Auto
from rematplan.planner.background import shared
from rematplan.planner.caches.plan_store import PlanStore
from rematplan.planner.core.plan import Plan
from rematplan.planner.core.simulator import resident_bytes
from rematplan.planner.family.plan_family import PlanFamily
from rematplan.runtime.graph.captured_step import CapturedStep

LOG = logging.getLogger("rematplan")
SEARCHES = 2
"""The largest number of background searches at a time for problems of one structure (ops and tensors, without
sizes). The plans that they find can be used at all sizes."""
GAIN = 1e-6
"""For `Rechoosing`, a plan is better if it is cheaper than the present one by more than this share of the latter's
cost."""


@dataclass(frozen=True)
class StepPlan:
    """A plan and the captured step that it plans."""

    step: CapturedStep
    """The ATen calls of forward and backward. It may have inverses that the step as first captured lacks."""
    plan: Plan
    spare: tuple[int, ...] = ()
    """The bytes of the budget that are unused at each position of the schedule (`spare_bytes`). It is empty if the
    plan does not free new gradients before the step ends."""
    gradients: int = 0
    """The bytes of gradients of earlier steps that may exist while the plan runs within its budget."""
    refinement: Refinement | None = None
    """A search for a better plan that has not begun; None if there is none."""
    problem: TrainingGraph | None = None
    """The plan's planning problem; None if nothing needs it."""
    notes: tuple[str, ...] = ()
    """Sentences for the user, such as why a plan for two lanes has one."""
    carries: bool = False
    """Whether the plan may be used at other sizes of the batch."""
    rounds: bool = False
    """Whether ops of the step are split or fused, so that results may differ from those of eager mode by rounding."""

    @property
    def unused(self) -> tuple[int, ...]:
        """The bytes of the budget that nothing uses at each position of the schedule. It is empty if they are not
        known, or gradients may use them."""
        if self.problem is None or self.spare:
            return ()
        budget = self.plan.peak if self.plan.budget is None else self.plan.budget
        return tuple(budget - held for held in resident_bytes(self.problem, self.plan.schedule))


@dataclass(frozen=True)
class Wanted:
    """A search for a better plan that another process makes."""

    problem: TrainingGraph
    """The planning problem of the step."""
    shapes: str
    """The types and shapes of the batch, as text for log messages."""
    budget: int
    """The budget in bytes."""
    plan: Plan
    """The plan with which training starts."""
    strategy: Auto
    """The planning algorithm."""
    starts: tuple[Plan, ...] = ()
    """Plans of the same step at other sizes, from which the search starts in addition to ``plan``."""


@dataclass(eq=False)
class Refining:
    """A search for a better plan of a step, in another process while training runs."""

    wanted: Wanted
    """What a search looks for."""
    finish: Callable[[Plan], StepPlan | None]
    """A function that makes a `StepPlan` of a better plan, or returns None to drop the plan."""
    store: PlanStore
    """Receives every plan that the search finds."""
    seconds: float = 0.0
    """How long the search has taken so far."""
    floor: float | None = None
    """The largest proven lower bound of the overhead, as a share of the step without recomputation; None if none."""
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
        """Start the search in another process, and return at once; if that process cannot take it, the search counts as
        ended. ``compiled`` compiles, in another thread, each plan that costs less than all before it; `take` returns
        its latest result."""
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
        name, fields = wanted.strategy.name, asdict(wanted.strategy)
        if not shared().submit(wanted.problem, wanted.budget, name, fields, starts, heard):
            self._ended.set()

    def _take_in(self, plan: Plan, compiled: Callable[[StepPlan], Any]) -> None:
        """Put a plan that the search found into ``store``, and raise ``floor`` to its proven bound. If the plan is the
        cheapest so far and `finish` keeps it, compile it, for `take`."""
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
        """Wait until the search ends, for at most ``seconds`` (None: no limit). Return whether it has."""
        return self._ended.wait(seconds)


@dataclass(eq=False)
class Rechoosing:
    """Finds a better plan of a step for certain sizes: it evaluates plans that were found at other sizes, and may
    begin a search in another process, whose plans join them."""

    plan: Plan
    """The plan in use."""
    best: Callable[[], Plan | None]
    """A function that returns the best plan of the family at these sizes; None if none fits."""
    finish: Callable[[Plan], StepPlan]
    """A function that makes a `StepPlan` of a plan."""
    family: PlanFamily
    """The known plans for all sizes. Whenever it has new ones, it is evaluated again."""
    search: Callable[[], Refining | None] | None
    """A function that returns a search in another process, or None if none is needed. None if the options exclude
    searches."""
    searches: list[Refinement]
    """The running searches at all sizes, shared by the objects of one family."""
    _compiled: Callable[[StepPlan], Any] = field(init=False)
    _seen: object = None
    _better: Plan | None = None
    _own: Refining | None = None
    _begun: threading.Event = field(default_factory=threading.Event)

    def begin(self, compiled: Callable[[StepPlan], Any]) -> None:
        """Begin a search in another process, prepared in a thread, unless there is none or `SEARCHES` are running.
        `take` passes a better plan to ``compiled``."""
        self._compiled, self._seen = compiled, self.family.members
        self.searches[:] = [one for one in self.searches if one.working]
        if self.search is None or len(self.searches) >= SEARCHES:
            self._begun.set()
            return
        self.searches.append(self)
        threading.Thread(target=self._search, args=(self.search,), daemon=True).start()

    def _search(self, search: Callable[[], Refining | None]) -> None:
        try:
            self._own = search()
            if self._own is not None:
                self._own.begin(lambda _found: None)  # its plans join the family
        finally:
            self._begun.set()

    @property
    def ready(self) -> bool:
        """Whether a plan is known that is cheaper at these sizes by more than `GAIN`. New plans of the family are
        evaluated here."""
        members = self.family.members
        if self._better is None and members is not self._seen:
            self._seen, found = members, self.best()
            if found is not None and found.estimate.cost < (1 - GAIN) * self.plan.estimate.cost:
                self._better = found
        return self._better is not None

    def take(self) -> tuple[StepPlan, Any]:
        """Put the better plan in use. Return it, and what the function passed to `begin` returns for it. Call it only
        if `ready` is true."""
        assert self._better is not None
        self.plan, self._better = self._better, None
        found = self.finish(self.plan)
        return found, self._compiled(found)

    @property
    def working(self) -> bool:
        """Whether the search at these sizes, if there is one, is still being prepared or running."""
        return not self._begun.is_set() or (self._own is not None and self._own.working)

    def wait(self, seconds: float | None = None) -> bool:
        """Wait until the search at these sizes has ended, at most ``seconds`` (None: without limit). Return whether it
        has ended."""
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


Refinement: TypeAlias = Refining | Rechoosing


def mapped(found: StepPlan, change: Callable[[StepPlan], StepPlan | None]) -> StepPlan | None:
    """Return a plan changed by ``change``, which also changes or drops every better plan that its search finds; None
    if it drops this one."""
    changed = change(found)
    if changed is None or found.refinement is None:
        return changed
    assert isinstance(found.refinement, Refining)
    return replace(changed, refinement=found.refinement.mapped(change))
