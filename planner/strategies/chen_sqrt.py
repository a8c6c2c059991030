"""√n checkpointing: segments of equal memory between cut points.

Chen, Xu, Zhang, Guestrin, «Training deep nets with sublinear memory cost», 2016, arXiv:1604.06174, section 4. A chain of n
layers in √n segments needs O(√n) memory for one further forward. On a general graph the candidates for a segment's end
are the nodes through which alone the part before communicates with the part after.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass
from typing import ClassVar

from rematplan.planner.forward_graph import ForwardGraph, bits
from rematplan.planner.lattice import cut_points
from rematplan.planner.strategies.block_strategy import BlockStrategy, Chain
from rematplan.planner.strategy import Progress


@dataclass(frozen=True)
class ChenSqrt(BlockStrategy):
    """For k = 1 .. 2√n: cut at the first cut point at or after each k-th of the memory. O(√n) plans."""

    name: ClassVar[str] = "chen_sqrt"
    summary: ClassVar[str] = "segments of equal memory between cut points (Chen et al. 2016)"

    def chains(self, view: ForwardGraph, progress: Progress) -> Iterable[Chain]:
        """One chain for each number of segments."""
        cuts = cut_points(view)
        before = [sum(view.bytes[v] for v in bits(cut)) for cut in cuts]
        total = sum(view.bytes)
        most = min(len(cuts) + 1, 2 * math.isqrt(len(view)) + 2)
        for k in range(1, most + 1):
            progress(k / most, f"{k} segments")
            chain: list[int] = []
            marks = iter(range(1, k))
            mark = next(marks, None)
            for cut, held in zip(cuts, before, strict=True):
                if mark is not None and held * k >= mark * total:
                    chain.append(cut)
                    while mark is not None and held * k >= mark * total:
                        mark = next(marks, None)
            yield (*chain, view.everything)
