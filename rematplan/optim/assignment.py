"""Assign Kronecker factors to the processes (their owners) that average and invert them."""

from __future__ import annotations

import heapq
from collections.abc import Mapping
from typing import TypeAlias, TypeVar

from rematplan.optim.factor import Factor

FactorKey: TypeAlias = tuple[str, int]
"""A Kronecker factor: the weight's name, and 0 for the factor of the inputs or 1 for that of the outputs' gradients."""
FactorPart: TypeAlias = tuple[str, tuple[int, ...]]
"""Factors of one weight with the same owner: its name, and (0,) for the inputs' factor, (1,) for that of the outputs'
gradients, or (0, 1)."""

LEAST_GAIN = 0.1
"""The factors of a layer get different owners only if the cheaper one takes at least this share of the layer's time."""


def owners(sides: Mapping[str, tuple[Factor, Factor]], ranks: int) -> dict[FactorPart, int]:
    """Return the rank that owns each Kronecker factor, or both factors (0, 1) of a layer. Costs of inversions are
    divided about evenly over ``ranks`` processes. ``sides``: the factors of each layer, in the same order in all
    processes."""
    even = sum(a.cost + g.cost for a, g in sides.values()) / ranks
    jobs: dict[FactorPart, float] = {}
    for name, (a, g) in sides.items():
        whole = a.cost + g.cost
        # A layer that takes longer than a fair share is divided, if its cheaper factor is worth it.
        if ranks > 1 and whole > even and min(a.cost, g.cost) >= LEAST_GAIN * whole:
            jobs |= {(name, (0,)): a.cost, (name, (1,)): g.cost}
        else:
            jobs[name, (0, 1)] = whole
    found = longest_first(jobs, ranks)
    for name in [name for name, at in found if at == (0,) and found[name, (0,)] == found[name, (1,)]]:
        found[name, (0, 1)] = found.pop((name, (0,)))
        del found[name, (1,)]
    order = {name: at for at, name in enumerate(sides)}
    return dict(sorted(found.items(), key=lambda item: (order[item[0][0]], item[0][1])))


def by_factor(parts: Mapping[FactorPart, int]) -> dict[FactorKey, int]:
    """Return the owner's rank of each single Kronecker factor; keys of ``parts`` may stand for two."""
    return {(name, at): owner for (name, these), owner in parts.items() for at in these}


def homes(sides: Mapping[str, tuple[Factor, Factor]], parts: Mapping[FactorPart, int]) -> dict[str, int]:
    """Return, by weight name, the rank that multiplies the layer's gradient by both inverses: the owner of the larger
    inverse."""
    owner = by_factor(parts)
    # The other owner sends the smaller inverse when it is new: about as many numbers as the gradient at most,
    # which the alternative would send in each step.
    larger = {name: int(g.inverse_bytes() > a.inverse_bytes()) for name, (a, g) in sides.items()}
    return {name: owner[name, larger[name]] for name in sides}


Job = TypeVar("Job")


def longest_first(costs: Mapping[Job, float], slots: int) -> dict[Job, int]:
    """Assign jobs to slots, numbered from 0, the longest first: the largest sum of costs in a slot is at most 4/3 of
    the smallest possible (Graham 1969). The result depends on ``costs`` and its order alone."""
    loads = [(0.0, slot) for slot in range(slots)]
    found = {}
    for job in sorted(costs, key=lambda job: -costs[job]):
        load, slot = heapq.heappop(loads)
        found[job] = slot
        heapq.heappush(loads, (load + costs[job], slot))
    return found
