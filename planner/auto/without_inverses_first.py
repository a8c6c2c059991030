"""Search for plans of a problem without its inverses first, then with them. Inverses are further ops that compute a
tensor from tensors that were computed from it.

Inverses enlarge the search space, and most plans use few of them. So a plan that was found without them is a good start
for the search with them.
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
    """Search for plans of several variants of one problem, in the order of ``problems``. Each search starts from the
    plans that were found for earlier variants.

    Args:
        problems: the problem without inverses, then with them; or other variants of a problem.
        share: for each problem except the last, the share of the remaining time (0 to 1) that its search gets. The last
            gets 1.
        search: called with a problem, its share of the remaining time and the start plans. It returns None if it finds
            no plan.

    Returns:
        Pairs of a problem and the plan found for it. Problems without a plan are left out.
    """
    found: Found = []
    for problem in problems:
        starts = tuple(plan for _, one in found if (plan := transfer_plan(one, problem)))
        plan = search(problem, 1.0 if problem is problems[-1] else share, starts)
        if plan is not None:
            found.append((problem, plan))
    return found
