"""Search for plans of several variants of a problem in order, each from the plans of those before.

The first is the problem without its inverses: they enlarge the search space, and most plans use few.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

from rematplan.ir import TrainingGraph
from rematplan.planner.caches.warm_starts import transfer_plan
from rematplan.planner.core.plan import Plan

Found = list[tuple[TrainingGraph, Plan]]


def search_variants(
    problems: Sequence[TrainingGraph],
    share: float,
    search: Callable[[TrainingGraph, float, tuple[Plan, ...]], Plan | None],
) -> Found:
    """Search variants of one problem in order, and return the plans found, each with its variant. ``search`` gets a
    variant, its share of the time left, and the earlier plans converted to it; it returns None for no plan. The last
    variant has the share 1, others ``share``."""
    found: Found = []
    for problem in problems:
        starts = tuple(plan for _, one in found if (plan := transfer_plan(one, problem)))
        plan = search(problem, 1.0 if problem is problems[-1] else share, starts)
        if plan is not None:
            found.append((problem, plan))
    return found
