"""√n checkpointing: segments of equal memory between cut points.

Chen, Xu, Zhang, Guestrin, «Training deep nets with sublinear memory cost», 2016, arXiv:1604.06174, section 4. A
chain of n layers in √n segments needs O(√n) memory and one additional forward pass. On a general graph, a segment
can end only at a node through which alone the part before it communicates with the part after it.
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


@dataclass(frozen=True)
class ChenSqrt(BlockStrategy):
    """Divide the forward into k = 2 .. 2√n blocks of about equal bytes (Chen et al. 2016, section 4), n being the
    number of nodes.

    A block ends at the first cut point after its share of the bytes: a node through which alone what is before it
    communicates with what is after it. At most `BLOCK_COUNTS_TRIED` values of k are tried: all small ones, and large
    ones in geometric steps.
    """

    name: ClassVar[str] = "chen_sqrt"
    summary: ClassVar[str] = "segments of equal memory between cut points (Chen et al. 2016)"

    def chains(self, view: ForwardGraph, progress: Progress) -> Iterable[Chain]:
        """Yield one chain of lower sets for each number of blocks."""
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
    """Return whole numbers from ``low`` to ``high``, denser at the lower end."""
    if high < low:
        return []
    steps = {round(low * (high / low) ** (i / (BLOCK_COUNTS_TRIED - 1))) for i in range(BLOCK_COUNTS_TRIED)}
    return sorted(steps | set(range(low, min(high + 1, low + BLOCK_COUNTS_TRIED // 2))))
