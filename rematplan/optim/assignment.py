"""Assign Kronecker factors to the processes (their owners) that average and invert them."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TypeAlias

from rematplan.optim.factor import Factor
from rematplan.optim.load_balancing import longest_first

FactorKey: TypeAlias = tuple[str, int]
"""A Kronecker factor: the weight's name, and 0 for the factor of the inputs or 1 for that of the outputs' gradients."""
FactorPart: TypeAlias = tuple[str, tuple[int, ...]]
"""Factors of one weight with the same owner: the weight's name, and (0,), (1,) or (0, 1) as in `FactorKey`."""

LEAST_GAIN = 0.1
"""The factors of a layer get different owners only if the cheaper one takes at least this share of the layer's time."""


def owners(sides: Mapping[str, tuple[Factor, Factor]], ranks: int) -> dict[FactorPart, int]:
    """Assign the Kronecker factors of all layers to processes, their owners, so that the time of inversions is divided
    evenly.

    Both factors of a layer get one owner, except in a layer that takes longer than the time of all layers divided by
    ``ranks``. The two factors of such a layer are assigned separately, if the cheaper one takes at least a tenth of the
    layer's time. The jobs (one or two factors of a layer) with the longest times are assigned first.

    Args:
        sides: the two factors of each layer (of the inputs, of the outputs' gradients), by weight name, in the same
            order in all processes.
        ranks: the number of processes.

    Returns:
        The owner's rank, from 0. The keys are pairs of a weight name and the tuple of those factors of the weight that
        this process owns: (0,) for that of the inputs, (1,) for that of the outputs' gradients, (0, 1) for both.
    """
    even = sum(a.cost + g.cost for a, g in sides.values()) / ranks
    jobs: dict[FactorPart, float] = {}
    for name, (a, g) in sides.items():
        whole = a.cost + g.cost
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
    """Return the owner's rank of each Kronecker factor, from a mapping ``parts`` whose keys may stand for two factors.

    A key of ``parts`` is a weight name and a tuple: (0,) for the factor of the inputs, (1,) for that of the outputs'
    gradients, (0, 1) for both. A key of the result is a weight name and 0 or 1.
    """
    return {(name, at): owner for (name, these), owner in parts.items() for at in these}


def homes(sides: Mapping[str, tuple[Factor, Factor]], parts: Mapping[FactorPart, int]) -> dict[str, int]:
    """Return, by weight name, the rank of the process that multiplies the layer's gradient by both inverses.

    This process is the owner of the larger inverse. If the smaller inverse has another owner, that owner sends it
    whenever it is new. The smaller inverse has at most about as many numbers as the gradient. (The alternative, to send
    the product of the gradient and one inverse, would send as many numbers as the gradient has in every step.)

    Args:
        sides: the two Kronecker factors of each layer, by weight name.
        parts: the rank of the owner of each factor or pair of factors, as from `owners`.
    """
    owner = by_factor(parts)
    larger = {name: int(g.inverse_bytes() > a.inverse_bytes()) for name, (a, g) in sides.items()}
    return {name: owner[name, larger[name]] for name in sides}
