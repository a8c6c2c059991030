"""What a planned module needs of a planner: plans of captured steps, with and without gradients of earlier steps."""

from __future__ import annotations

from collections.abc import Set
from typing import Protocol

from rematplan.planner.core.plan import Plan
from rematplan.runtime.graph.captured_step import CapturedStep
from rematplan.runtime.problem.accumulation import StepPlan


class Planner(Protocol):
    """Makes plans of captured training steps. A plan is a schedule of the step's planning problem with a loss boundary
    (the moment between forward and backward), as `loss_boundary.with_loss_boundary` makes it."""

    @property
    def bounds_one_call(self) -> bool:
        """Whether the budget bounds one call alone: a forward with its backward. If not, it bounds several calls
        together, whose forwards run before the backward of the first one."""

    def __call__(self, step: CapturedStep, first: bool = False) -> StepPlan:
        """Return a plan of a step.

        Args:
            step: the captured training step.
            first: whether to treat an infeasible budget as for the first plan of a module, even if the planner has made
                plans. By default an infeasible budget raises for the first plan. For later steps, the plan with the
                smallest peak that was found is returned instead.

        Raises:
            InfeasibleBudget: no plan fits the budget, and the planner's options say to raise.
        """

    def with_gradients(
        self, step: CapturedStep, plan: Plan, gradients: int, names: Set[str]
    ) -> StepPlan | None:
        """Return a plan for a step that is executed while gradients of earlier steps exist. Return None if ``plan`` can
        still be used: because it fits the budget together with these gradients, or because the planner's options accept
        that it does not fit.

        Args:
            step: the captured step.
            plan: its plan without gradients of earlier steps.
            gradients: the bytes of the gradients of earlier steps.
            names: the parameters that have gradients of earlier steps, under the names that they have in the step.

        Raises:
            InfeasibleBudget: no plan fits the budget, and the planner's options say to raise.
        """
