"""Prove that a planned step fits its budget at every size of a range, before any of these sizes is met."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from rematplan.ir import TrainingGraph, UsageError
from rematplan.planner.auto.strategy import Auto
from rematplan.plans.range_planning import RangePlan, plan_range, prove_sizes
from rematplan.plans.size_ranges import problems_over
from rematplan.plans.step_planner import StepPlanner
from rematplan.runtime.graph.captured_step import CapturedStep


def prove_step(
    planner: StepPlanner, dimension: str, sizes: Sequence[int], step_at: Callable[[int], CapturedStep]
) -> RangePlan:
    """Return what fits at each size of one dimension of a step.

    The planner's plans are evaluated first. Where none of them fits, it searches, and keeps what it finds.

    Args:
        planner: of the step; its budget, costs, constraints and known plans hold for all sizes.
        dimension: its name, for messages.
        sizes: in ascending order, without gaps.
        step_at: returns the step at a size. It is called for few sizes where the sizes of all tensors are polynomials
            of it, and else for all.

    Raises:
        UsageError: the budget is ``min``, which is another one at each size.
    """

    def capture(size: int) -> TrainingGraph:
        return planner.problem(planner.opened(step_at(size)))

    stated = planner.options.stated_budget()
    if stated.kind == "min":
        raise UsageError("a range of sizes needs a budget in bytes or a share: min differs from size to size")
    problems = problems_over(dimension, sizes, capture)
    budget = planner.limit(problems.captured[problems.sizes[-1]]).bytes(0, lambda: 0)
    found, search = prove_sizes(problems, budget, planner.store), planner.options.chosen()
    if found.proof.holds or not isinstance(search, Auto):
        return found
    return plan_range(problems, budget, search, store=planner.store)
