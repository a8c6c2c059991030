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
    """
    found: Found = []
    for problem in problems:
        starts = tuple(plan for _, one in found if (plan := transfer_plan(one, problem)))
        plan = search(problem, 1.0 if problem is problems[-1] else share, starts)
        if plan is not None:
            found.append((problem, plan))
    return found
