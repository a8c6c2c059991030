"""The plan that calls follow now, and its replacement by a better one between two training steps."""

from __future__ import annotations

from dataclasses import dataclass, replace

from rematplan.planner.core.plan import Plan
from rematplan.runtime.execute.autograd_function import CompiledPlan
from rematplan.runtime.problem.accumulation import Refinement, StepPlan


@dataclass(eq=False)
class Running:
    """A compiled plan, and the search for a better one (None if there is none).

    ``swaps``: how often a better plan has replaced it.
    """

    plan: Plan
    compiled: CompiledPlan
    refinement: Refinement | None = None
    swaps: int = 0

    @classmethod
    def of(cls, found: StepPlan) -> Running:
        """Compile a plan, and begin the search for a better one."""
        running = cls(found.plan, compiled(found), found.refinement)
        if found.refinement is not None:
            found.refinement.begin(compiled)
        return running

    @property
    def shown(self) -> Plan:
        """The plan that calls follow, with the largest lower bound known so far. Its status is ``refining``
        while a better plan is being searched for."""
        plan, search = self.plan, self.refinement
        if search is None:
            return plan
        floors = [floor for floor in (plan.lower_bound, search.floor) if floor is not None]
        bound = min(max(floors), plan.estimate.overhead) if floors else None
        return replace(plan, lower_bound=bound, status="refining" if search.working else plan.status)

    @property
    def improved(self) -> bool:
        """Whether a better plan is ready."""
        return self.refinement is not None and self.refinement.ready

    def swap(self) -> StepPlan:
        """Replace the plan by the better one, which is compiled already, and return that. Calls in progress
        continue with their plan."""
        assert self.refinement is not None
        found, self.compiled = self.refinement.take()
        self.plan = found.plan
        self.swaps += 1
        return found


def compiled(found: StepPlan) -> CompiledPlan:
    """Return a step's plan, compiled for autograd."""
    return CompiledPlan(found.step, found.plan.schedule, found.plan.lanes, found.spare)
