"""Divide a chain of blocks into stages with a fast slowest stage and a small makespan, by dynamic programming
(Bokhari 1988; PipeDream, 2019).

    slowest[s + 1, j] = min over i of max(slowest[s, i], l(i), c(i, j, s))

c(i, j, s) is the time of stage s with blocks i to j − 1; l(i) is the time for which messages before block i
occupy a link. M micro-batches take about M − 1 times the slowest stage plus the time of one through all
stages. So the table keeps all divisions that no other beats in both times; O(S·n²·divisions).
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass

from rematplan.ir import UsageError
from rematplan.planner.core.strategy import undominated
from rematplan.planner.pipeline.stage_chain import StageChain
from rematplan.planner.pipeline.timeline import FREE_LINK, Link

StageTime = Callable[[int, int, int], float]
"""Takes (i, j, s), and returns the microseconds of stage s with blocks i to j − 1 for one micro-batch; infinity if it
does not fit the budget."""
Cuts = tuple[int, ...]
"""The blocks at which the second and each later stage begin."""
MOST_PAIRS = 32
"""The largest number of divisions that the dynamic program keeps for one block and one number of stages; further ones
differ by little."""


@dataclass(frozen=True, slots=True)
class StagePartition:
    """A division of a chain of blocks into stages."""

    cuts: Cuts
    slowest: float
    """Microseconds of the slowest stage or link, for one micro-batch."""
    through: float
    """Microseconds of one micro-batch through all stages and links."""


def partitions(
    chain: StageChain, stages: int, time: StageTime, link: Link = FREE_LINK
) -> list[StagePartition]:
    """Return up to `MOST_PAIRS` undominated divisions into ``stages`` stages, by rising time of the slowest; none if no
    division fits the budget. `UsageError` if the chain has too few places for cuts."""
    places = chain.allowed()
    if len(places) < stages - 1:
        tied = chain.label(next(iter(chain.whole))) if chain.whole else ""
        raise UsageError(
            f"{chain.graph.name} cannot be divided into {stages} stages, only into {len(places) + 1}"
            f"{f': stages cannot share {tied}, which several parts read; untie it' if tied else ''}"
        )

    def ended(front: dict[int, list[StagePartition]], stage: int, end: int) -> list[StagePartition]:
        """Return the divisions of the blocks before ``end`` whose last stage is number ``stage``. ``front``: by block,
        the divisions of all blocks before it into the stages before."""
        found = []
        for begin, divisions in front.items():
            own = time(begin, end, stage) if divisions and begin < end else math.inf
            if own == math.inf:
                continue
            sizes = (chain.sends[begin], chain.returns[begin]) if begin else ()
            occupied = max(map(link.occupied, sizes), default=0.0)
            travel = math.fsum(map(link.travel, sizes))
            for before in divisions:
                cuts = (*before.cuts, begin) if begin else ()
                found.append(
                    StagePartition(cuts, max(before.slowest, occupied, own), before.through + travel + own)
                )
        return found

    front = {0: [StagePartition((), 0.0, 0.0)]}
    for stage in range(stages):
        last = stage == stages - 1
        ends = (len(chain),) if last else places[stage : len(places) - (stages - 2 - stage)]
        front = {end: _undominated(ended(front, stage, end)) for end in ends}
    return front[len(chain)]


def _undominated(found: list[StagePartition]) -> list[StagePartition]:
    front = undominated(found, lambda p: (p.slowest, p.through))  # type: ignore[arg-type, return-value]
    return front[:MOST_PAIRS]


def shifted(chain: StageChain, cuts: Cuts) -> list[Cuts]:
    """Return all cuts that differ from ``cuts`` in one stage, which begins at the next or previous allowed block."""
    places = chain.allowed()
    found = []
    for at, cut in enumerate(cuts):
        for step in (-1, 1):
            to = places.index(cut) + step
            if 0 <= to < len(places) and places[to] not in cuts:
                found.append((*cuts[:at], places[to], *cuts[at + 1 :]))
    return found


def descent(chain: StageChain, cuts: Cuts, cost: Callable[[Cuts], float], most: int) -> Cuts:
    """Return cuts no more expensive than ``cuts``, by repeated exchange for the cheapest of `changed`. The ``cost`` of
    at most ``most`` other cuts is computed."""
    while near := changed(chain, cuts)[:most]:
        most -= len(near)
        best = min((cuts, *near), key=cost)
        if best == cuts:
            break
        cuts = best
    return cuts


def changed(chain: StageChain, cuts: Cuts) -> list[Cuts]:
    """Return other cuts: a stage begins at any allowed block between its neighbours, or two steps of
    `shifted`. Small moves come first.
    """
    ends = (0, *cuts, len(chain))
    two = [both for first in shifted(chain, cuts) for both in shifted(chain, first)]
    one = [
        (abs(to - cuts[at]), (*cuts[:at], to, *cuts[at + 1 :]))
        for at in range(len(cuts))
        for to in chain.allowed()
        if ends[at] < to < ends[at + 2]
    ]
    ordered = (*shifted(chain, cuts), *two, *(other for _, other in sorted(one)))
    return [other for other in dict.fromkeys(ordered) if other != cuts]
