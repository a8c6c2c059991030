"""The problems of one step, without and with inverses, searched one after the other.

Inverses make the search space larger, and most plans use few of them. So the problem without them is searched first,
and what is found there starts the search with them.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

from rematplan.ir import TrainingGraph
from rematplan.planner.caches.warm_starts import transfer_plan
from rematplan.planner.core.plan import Plan

Found = list[tuple[TrainingGraph, Plan]]


def plain_first(
    problems: Sequence[TrainingGraph],
    share: float,
    search: Callable[[TrainingGraph, float, tuple[Plan, ...]], Plan | None],
) -> Found:
    """Search each problem, the ones before it giving the start plans.

    Args:
        problems: of one step: without inverses, then with them; or one alone.
        share: of the time (0 to 1) that a problem gets which is not the last; the last may take all that is left.
        search: gets a problem, its share of the time and the start plans; None where it finds no plan.
    """
    found: Found = []
    for problem in problems:
        starts = tuple(plan for _, one in found if (plan := transfer_plan(one, problem)))
        plan = search(problem, 1.0 if problem is problems[-1] else share, starts)
        if plan is not None:
            found.append((problem, plan))
    return found
