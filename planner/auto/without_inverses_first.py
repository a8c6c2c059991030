"""Search a problem without its inverses first, then with them.

Inverses enlarge the search space, and most plans use few of them. So a plan found without them is a good start for
the search with them.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

from rematplan.ir import TrainingGraph
from rematplan.planner.caches.warm_starts import transfer_plan
from rematplan.planner.core.plan import Plan

Found = list[tuple[TrainingGraph, Plan]]


def search_without_inverses_first(
    problems: Sequence[TrainingGraph],
    share: float,
    search: Callable[[TrainingGraph, float, tuple[Plan, ...]], Plan | None],
) -> Found:
    """Search variants of one problem in order, each from the plans that were found for earlier variants.

    Args:
        problems: the problem without inverses, then with them; or a single problem.
        share: the share of the remaining time (0 to 1) for each problem except the last, which gets all of it.
        search: called with a problem, its share of the remaining time and the start plans. It returns None if it
            finds no plan.

    Returns:
        Each problem for which a plan was found, with that plan.
    """
    found: Found = []
    for problem in problems:
        starts = tuple(plan for _, one in found if (plan := transfer_plan(one, problem)))
        plan = search(problem, 1.0 if problem is problems[-1] else share, starts)
        if plan is not None:
            found.append((problem, plan))
    return found
