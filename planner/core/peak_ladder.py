"""The cheapest plans found at peaks from the least one up: what a little more memory saves."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import TypeAlias

from rematplan.planner.core.plan import Plan, by_cost

RUNGS = (1.0, 1.01, 1.02, 1.05, 1.1, 1.2)
"""The peaks at which plans are compared, as multiples of the smallest one."""

Point: TypeAlias = "tuple[int, float]"
"""The peak of a plan in bytes, and its overhead."""


def ladder(plans: Iterable[Plan]) -> tuple[Point, ...]:
    """Return the peak and overhead of the cheapest plan within each of `RUNGS` times the smallest peak, by rising peak,
    equal ones once; empty without plans."""
    known = list(plans)
    least = min((plan.peak for plan in known), default=0)
    rungs = ([plan for plan in known if plan.peak <= int(share * least)] for share in RUNGS)
    cheapest = (min(fitting, key=by_cost) for fitting in rungs if fitting)
    return tuple(dict.fromkeys((plan.peak, plan.estimate.overhead) for plan in cheapest))


def knee(points: Sequence[Point]) -> Point | None:
    """Return the point that is farthest below the straight line from the first point to the last; None if no point is
    below it, or with fewer than three. ``points``: by rising peak."""
    if len(points) < 3:
        return None
    (low, dear), (high, cheap) = points[0], points[-1]

    def below(point: Point) -> float:
        return dear + (cheap - dear) * (point[0] - low) / (high - low) - point[1]

    best = max(points, key=below)
    return best if below(best) > 0 else None
