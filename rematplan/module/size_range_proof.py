"""Before training, prove that at every size in the ranges that a user states, a plan of the module fits the budget."""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Mapping, Sequence
from types import MappingProxyType
from typing import Any, TypeAlias

from torch import nn

from rematplan.ir import TrainingGraph, UnfitSizes, UsageError
from rematplan.module.plan_access import captured_step
from rematplan.module.shape_options import Axis, ShapeOptions
from rematplan.planner.auto.auto_strategy import Auto
from rematplan.plans.options import RAISE
from rematplan.plans.planner import Planner
from rematplan.plans.range_planning import RangePlan, plan_range, prove_sizes
from rematplan.plans.size_ranges import problems_over
from rematplan.runtime.graph.captured_step import CapturedStep
from rematplan.runtime.graph.warn import warn

MOST_STEPS = 32
"""The largest number of sizes of one dimension at which the step is captured for a proof. If more are needed, the proof
is given up."""
MOST_LINES = 12
"""Up to this many combinations of sizes of all dimensions except the longest, every combination is proven."""

AxisNumbers: TypeAlias = dict[Axis, int]


class _TooMany(Exception):
    """Raised to end a proof that would capture the step at more than `MOST_STEPS` sizes of a dimension."""


def prove_ranges(
    planned: nn.Module,
    planner: Planner,
    shapes: ShapeOptions,
    model: nn.Module,
    args: Sequence[Any],
    kwargs: Mapping[str, Any],
) -> None:
    """Find plans for the sizes in a user's ranges; not with several calls in flight, reserved gradients, rounding, a
    saved plan, ``min`` or ``least``. If no known plan fits at some size, raises `UnfitSizes`, or warns if
    ``on_infeasible`` is ``least`` or ``eager``. Warns of what is not proven."""
    options, refusals = planner.options, list[str]()
    if options.several or options.reserved.gradients or options.rounds or options.saved is not None:
        return  # the problems of a proof have neither splits nor fused kernels
    if options.stated_budget().is_lean:
        return
    # The other dimensions have fixed sizes. Sizes below 2 have other ops and are not checked.
    for axis, fixed in _lines({axis: shapes.usual(axis) for axis in shapes.axes}):
        made = set[int]()

        def step_at(
            size: int, axis: Axis = axis, fixed: AxisNumbers = fixed, made: set[int] = made
        ) -> CapturedStep:
            made.add(size)
            if len(made) > MOST_STEPS:
                raise _TooMany
            return captured_step(planned, *shapes.call_of_sizes(model, args, kwargs, {**fixed, axis: size}))

        name, sizes = _named(axis, fixed), shapes.usual(axis)
        try:
            refusals.append(prove_step(planner, name, sizes, step_at).refusal)
        except _TooMany:
            warn(
                f"dynamic_shapes: whether a plan fits at every size of {_named(axis, fixed)} from {sizes[0]} to "
                f"{sizes[-1]} is not proven, because each size would need a step of its own; plans are made for the "
                f"largest size first"
            )
            break  # the same holds for other sizes of the other dimensions
    for refusal in filter(None, refusals):
        if options.on_infeasible in (None, RAISE):
            raise UnfitSizes(refusal)
        warn(refusal)


def _lines(usual: Mapping[Axis, range]) -> list[tuple[Axis, AxisNumbers]]:
    """Return the axis with the most numbers, once for each combination of the other axes' fixed numbers, larger ones
    first. Beyond `MOST_LINES` combinations, each axis varies once, the others having their largest numbers, and a
    warning says so."""
    axes = [axis for axis, numbers in usual.items() if numbers]
    if not axes:
        return []
    longest = max(axes, key=lambda axis: len(usual[axis]))
    others = [axis for axis in axes if axis is not longest]
    count = math.prod(len(usual[axis]) for axis in others)
    if count <= MOST_LINES:
        points = itertools.product(*(reversed(usual[axis]) for axis in others))
        return [(longest, dict(zip(others, point, strict=True))) for point in points]
    warn(
        f"dynamic_shapes: of {count * len(usual[longest])} combinations of sizes, only those with at most one size "
        f"below its largest are proven. For a proof of all, state ranges that leave at most {MOST_LINES} combinations "
        f"apart from {_named(longest)} (of {count}), or the same Dim for dimensions that vary together"
    )
    return [(axis, {}) for axis in axes]


def _named(axis: Axis, fixed: Mapping[Axis, int] = MappingProxyType({})) -> str:
    others = " and ".join(f"{other.name} = {number}" for other, number in fixed.items())
    return f"{axis.name}{others and f' with {others}'}"


def prove_step(
    planner: Planner, dimension: str, sizes: Sequence[int], step_at: Callable[[int], CapturedStep]
) -> RangePlan:
    """Return each size's best known plan and whether it fits; a time-limited `Auto` searches for more if some do not. A
    percentage that is not fixed yet is of the largest size's peak; `UsageError` for ``min`` or ``least``."""

    def capture(size: int) -> TrainingGraph:
        return planner.problem(planner.with_inverses(step_at(size)))

    stated = planner.options.stated_budget()
    if stated.is_lean:
        raise UsageError(
            f"a range of sizes needs a budget in bytes or a share: {stated.text} differs from size to size"
        )
    problems = problems_over(dimension, sizes, capture)
    budget = planner.limit(problems.captured[problems.sizes[-1]]).fixed
    assert budget is not None
    found, search = prove_sizes(problems, budget, planner.store), planner.options.strategy
    if found.proof.holds or not isinstance(search, Auto) or search.counted:
        return found
    return plan_range(problems, budget, search, store=planner.store)
