"""The plan that calls follow now, and its exchange for a better one between two steps."""

from __future__ import annotations

from dataclasses import dataclass

from rematplan.planner.core.plan import Plan
from rematplan.runtime.execute.autograd_function import CompiledPlan
from rematplan.runtime.problem.accumulation import Refinement, StepPlan


@dataclass(eq=False)
class Running:
    """A plan, compiled, and the search for a better one, if there is one.

    ``swaps``: how often a better plan has taken its place.
    """

    plan: Plan
    compiled: CompiledPlan
    refinement: Refinement | None = None
    swaps: int = 0

    @classmethod
    def of(cls, found: StepPlan) -> Running:
        """Compile a plan and have the search for a better one begun."""
        running = cls(found.plan, compiled(found), found.refinement)
        if found.refinement is not None:
            found.refinement.begin(compiled)
        return running

    @property
    def improved(self) -> bool:
        """Whether a better plan is there to be taken."""
        return self.refinement is not None and self.refinement.ready

    def swap(self) -> StepPlan:
        """Take the better plan, which was compiled before. Calls under way go on with the plan that they began with."""
        assert self.refinement is not None
        found, self.compiled = self.refinement.take()
        self.plan = found.plan
        self.swaps += 1
        return found


def compiled(found: StepPlan) -> CompiledPlan:
    """A step's plan as code that takes part in autograd."""
    return CompiledPlan(found.step, found.plan.schedule, found.plan.lanes, found.spare)
