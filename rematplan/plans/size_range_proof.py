"""Prove that a planned step fits its budget at every size of a range, before any of these sizes is met."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from torch import nn

from rematplan.ir import TrainingGraph, UnfitSizes, UsageError
from rematplan.planner.auto.auto_strategy import Auto
from rematplan.plans.options import RAISE
from rematplan.plans.range_planning import RangePlan, plan_range, prove_sizes
from rematplan.plans.size_ranges import problems_over
from rematplan.plans.step_planner import StepPlanner
from rematplan.runtime.graph.captured_step import CapturedStep
from rematplan.runtime.graph.warn import warn
from rematplan.runtime.module.planned_module import step_of
from rematplan.runtime.module.shape_options import Axis, ShapeOptions

SMALLEST = 2
"""The smallest size that is proven."""
MOST_STEPS = 32
"""The number of sizes whose steps are made for a proof. Where more are needed, nothing is proven."""


class _TooMany(Exception):
    """A proof needs the step of each size."""


def prove_ranges(
    planned: nn.Module,
    planner: StepPlanner,
    shapes: ShapeOptions,
    model: nn.Module,
    args: Sequence[Any],
    kwargs: Mapping[str, Any],
) -> tuple[RangePlan, ...]:
    """Return what fits at each size of each range of a planned module's arguments.

    While one dimension varies, the others have their largest sizes. Sizes below 2 have graphs of their own and are not
    among these. Nothing is proven with a saved plan, inverses that round, accumulation, several micro-batches in flight
    or the budget ``min``: there the plan of a size depends on more than its problem.

    Raises:
        UnfitSizes: no plan is known that fits at some size, unless the options state another reaction.
    """
    options, found = planner.options, list[RangePlan]()
    if options.several or options.accumulate or options.inverting or options.plan is not None:
        return ()
    if options.stated_budget().is_lean:
        return ()
    for axis in shapes.axes:
        made = set[int]()

        def step_at(size: int, axis: Axis = axis, made: set[int] = made) -> CapturedStep:
            made.add(size)
            if len(made) > MOST_STEPS:
                raise _TooMany
            return step_of(planned, *shapes.call_of_sizes(model, args, kwargs, {axis: size}))

        dim, low, high = axis
        sizes = range(max(low, SMALLEST), high + 1)
        try:
            found += [prove_step(planner, f"the size of dimension {dim}", sizes, step_at)] if sizes else []
        except _TooMany:
            warn(
                f"shape_ranges: whether a plan fits at every size of dimension {dim} from {sizes[0]} to {high} is not "
                f"proven, because each size would need a step of its own; plans are made for the largest size first"
            )
    for refusal in filter(None, (one.refusal for one in found)):
        if options.on_infeasible in (None, RAISE):
            raise UnfitSizes(refusal)
        warn(refusal)
    return tuple(found)


def prove_step(
    planner: StepPlanner, dimension: str, sizes: Sequence[int], step_at: Callable[[int], CapturedStep]
) -> RangePlan:
    """Return what fits at each size of one dimension of a step.

    The planner's plans are evaluated first. Where none of them fits, it searches, and keeps what it finds.

    Args:
        planner: plans the step. Its budget, costs, constraints and known plans are used for all sizes.
        dimension: the name of the dimension, for messages.
        sizes: the sizes of the dimension, in ascending order, without gaps.
        step_at: returns the step at a size. It is called for a few sizes if the bytes of all tensors are polynomials
            of the size, and otherwise for more, up to all.

    Raises:
        UsageError: the budget is ``min``, which is another one at each size.
    """

    def capture(size: int) -> TrainingGraph:
        return planner.problem(planner.opened(step_at(size)))

    stated = planner.options.stated_budget()
    if stated.is_lean:
        raise UsageError(
            f"a range of sizes needs a budget in bytes or a share: {stated.text} differs from size to size"
        )
    problems = problems_over(dimension, sizes, capture)
    budget = planner.limit(problems.captured[problems.sizes[-1]]).bytes(0, lambda: 0)
    found, search = prove_sizes(problems, budget, planner.store), planner.options.chosen()
    if found.proof.holds or not isinstance(search, Auto):
        return found
    return plan_range(problems, budget, search, store=planner.store)
