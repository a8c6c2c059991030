"""Divide a chain into stages, so that the slowest stage is as fast as possible and the pipeline ends early.

The recurrence is over blocks j and stages s. c(i, j, s) is the time of a stage of blocks i to j − 1, and l(i) is the
time for which the messages at its start occupy a link:

    slowest[s + 1, j] = min over i of max(slowest[s, i], l(i), c(i, j, s))

The time of one micro-batch through all stages and links counts, too: the makespan of M micro-batches is about this
time plus M − 1 times the slowest. So each entry keeps all pairs (slowest, through) that no other pair beats in both,
and the simulation of the pipeline chooses among those of the last entry. It takes O(S·n²·pairs) time.

Min-max partitions of chains by dynamic programming: Bokhari 1988; for pipelines Narayanan et al., PipeDream, SOSP
2019.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from rematplan.ir import UsageError
from rematplan.planner.core.strategy import undominated
from rematplan.planner.pipeline.stage_chain import StageChain
from rematplan.planner.pipeline.timeline import FREE_LINK, Link

StageTime = Callable[[int, int, int], float]
"""Takes (i, j, s), and returns the microseconds that stage s of blocks i to j − 1 takes for one micro-batch; infinity
if the stage does not fit the budget."""
Cuts = tuple[int, ...]
"""The blocks at which the second and each later stage begin."""
MOST_PAIRS = 32
"""The largest number of pairs (slowest stage, time through all stages) that an entry of the table keeps; further ones
differ by little."""


@dataclass(frozen=True, slots=True)
class Partition:
    """A division of a chain into stages.

    ``cuts``: the blocks at which the second and each later stage begin. ``slowest``: microseconds of the slowest stage
    or link, for one micro-batch. ``through``: microseconds of one micro-batch through all stages and links.
    """

    cuts: Cuts
    slowest: float
    through: float


def partitions(chain: StageChain, stages: int, time: StageTime, link: Link = FREE_LINK) -> list[Partition]:
    """Return divisions of a chain into ``stages`` stages, by rising time of the slowest stage. No other division
    beats one of them in both the slowest stage and the time through all stages.

    They are at most `MOST_PAIRS`; none if no division fits.

    Args:
        chain: the blocks.
        stages: the number of stages.
        time: returns the microseconds that a stage takes for one micro-batch.
        link: latency and bandwidth between stages.

    Raises:
        UsageError: there are too few places to cut at.
    """
    places = chain.allowed()
    if len(places) < stages - 1:
        tied = f"; {chain.label(next(iter(chain.whole)))} is read at several of them" if chain.whole else ""
        raise UsageError(
            f"{chain.graph.name} can be divided into at most {len(places) + 1} stages, not {stages}{tied}"
        )
    begins = (0, *places)
    front = {0: [Partition((), 0.0, 0.0)]}
    for stage in range(stages):
        last = stage == stages - 1
        ends = (len(chain),) if last else places[stage : len(places) - (stages - 2 - stage)]
        front = {end: _undominated(_ended(chain, front, begins, end, stage, time, link)) for end in ends}
    return front[len(chain)]


def _ended(
    chain: StageChain,
    front: dict[int, list[Partition]],
    begins: Sequence[int],
    end: int,
    stage: int,
    time: StageTime,
    link: Link,
) -> list[Partition]:
    """Return the divisions of the blocks before ``end`` whose last stage is number ``stage``."""
    found = []
    for begin in begins:
        if begin >= end or not front.get(begin):
            continue
        own = time(begin, end, stage)
        if own == math.inf:
            continue
        sizes = (chain.sends[begin], chain.returns[begin]) if begin else ()
        occupied = max(map(link.occupied, sizes), default=0.0)
        travel = math.fsum(map(link.travel, sizes))
        for before in front[begin]:
            cuts = (*before.cuts, begin) if begin else ()
            found.append(Partition(cuts, max(before.slowest, occupied, own), before.through + travel + own))
    return found


def _undominated(found: list[Partition]) -> list[Partition]:
    front = undominated(found, lambda p: (p.slowest, p.through))  # type: ignore[arg-type, return-value]
    return front[:MOST_PAIRS]


def shifted(chain: StageChain, cuts: Cuts) -> list[Cuts]:
    """Return all cuts that differ from ``cuts`` in one place, which is moved to the next place where a cut is
    allowed, before or after it."""
    places = chain.allowed()
    found = []
    for at, cut in enumerate(cuts):
        for step in (-1, 1):
            to = places.index(cut) + step
            if 0 <= to < len(places) and places[to] not in cuts:
                found.append((*cuts[:at], places[to], *cuts[at + 1 :]))
    return found
