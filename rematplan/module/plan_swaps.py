"""The plan of a cache entry that calls follow now, and its replacement by a better plan between two training steps.

`Runner._exchange` decides when: at a new step, if no backward is pending.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace

from rematplan.planner.core.plan import Plan
from rematplan.plans.refining import Refinement, StepPlan
from rematplan.runtime.execute.compiled_plan import CompiledPlan


@dataclass(eq=False)
class Running:
    """The compiled plan that calls of a planned module follow now, and a search in the background for a better plan."""

    plan: Plan
    """The plan."""
    compiled: CompiledPlan
    """The compiled form of the plan."""
    refinement: Refinement | None = None
    """The search; None if there is none."""
    swaps: int = 0
    """How often a better plan from the search has replaced the plan."""

    @classmethod
    def of(cls, found: StepPlan, compile_: Callable[[StepPlan], CompiledPlan] | None = None) -> Running:
        """Compile a plan and return it as the present one, and begin its search for a better plan, if it has one."""
        compile_ = compile_ or compiled
        running = cls(found.plan, compile_(found), found.refinement)
        if found.refinement is not None:
            found.refinement.begin(compile_)
        return running

    @property
    def shown(self) -> Plan:
        """The plan, with the search's lower bound if that is larger; ``refining`` while the search runs."""
        plan, search = self.plan, self.refinement
        if search is None:
            return plan
        floors = [floor for floor in (plan.lower_bound, search.floor) if floor is not None]
        bound = min(max(floors), plan.estimate.overhead) if floors else None
        return replace(plan, lower_bound=bound, status="refining" if search.working else plan.status)

    @property
    def improved(self) -> bool:
        """Whether the search has found a better plan that is compiled and can replace the present one (`swap`)."""
        return self.refinement is not None and self.refinement.ready

    def swap(self) -> StepPlan:
        """Replace the plan by the better one of `improved`, and return that one; calls in progress continue with the
        old plan. If all first runs of the old plan passed their comparison, the new one is not compared."""
        assert self.refinement is not None
        before = self.compiled
        found, self.compiled = self.refinement.take()
        if before.first_runs.all_passed:
            self.compiled.first_runs.pass_all()
        self.plan = found.plan
        self.swaps += 1
        return found


def compiled(found: StepPlan) -> CompiledPlan:
    """Return a step's plan in compiled form, as an object that takes part in autograd when it is called."""
    unused = found.unused if found.rounds else ()
    return CompiledPlan(found.step, found.plan.schedule, found.plan.lanes, found.spare, unused=unused)
