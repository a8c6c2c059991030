"""The strategy `chen_sqrt`: blocks of about equal bytes that end at cut points (Chen et al. 2016, section 4).

A chain of n layers in √n blocks needs O(√n) memory and one more forward.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass
from typing import ClassVar

from rematplan.planner.blocks.forward_graph import ForwardGraph, bits
from rematplan.planner.blocks.lower_sets import cut_points
from rematplan.planner.core.strategy import Progress
from rematplan.planner.strategies.block_strategy import BlockStrategy, Chain

BLOCK_COUNTS_TRIED = 24
"""The number of block counts in geometric progression that are tried. Half as many of the smallest counts are tried in
any case."""


@dataclass(frozen=True)
class ChenSqrt(BlockStrategy):
    """Divide the forward into k blocks of about equal bytes, for several k from 2 to about 2√n, with n nodes (Chen et
    al. 2016, section 4).

    A block ends at a cut point: a node v through which all data passes. The nodes that must run after v read only v and
    each other. Block i of k ends at the first cut point up to which the nodes have i/k of all bytes. All small k and a
    geometric progression of large k are tried (`BLOCK_COUNTS_TRIED`). No k is above the number of cut points + 1.
    """

    name: ClassVar[str] = "chen_sqrt"
    summary: ClassVar[str] = "segments of equal memory between cut points (Chen et al. 2016)"

    def chains(self, view: ForwardGraph, progress: Progress) -> Iterable[Chain]:
        """Yield one chain of lower sets for each number of blocks that is tried."""
        cuts = cut_points(view)
        before = [sum(view.bytes[v] for v in bits(cut)) for cut in cuts]
        total = sum(view.bytes)
        counts = _spread(2, min(len(cuts) + 1, 2 * math.isqrt(len(view)) + 2))
        for done, k in enumerate(counts):
            progress(done / len(counts), f"{k} segments")
            chain: list[int] = []
            mark = 1
            for cut, bytes_ in zip(cuts, before, strict=True):
                if mark < k and bytes_ * k >= mark * total:
                    chain.append(cut)
                    mark = bytes_ * k // max(total, 1) + 1
            yield (*chain, view.everything)


def _spread(low: int, high: int) -> list[int]:
    """Return ascending numbers from ``low`` to ``high``: all of the smallest, then a geometric progression;
    empty if ``high`` < ``low``.
    """
    if high < low:
        return []
    steps = {round(low * (high / low) ** (i / (BLOCK_COUNTS_TRIED - 1))) for i in range(BLOCK_COUNTS_TRIED)}
    return sorted(steps | set(range(low, min(high + 1, low + BLOCK_COUNTS_TRIED // 2))))
