"""Greedy checkpointing: sum up the bytes of the nodes, and cut at the next cut point when the sum exceeds a
threshold b.

Chen, Xu, Zhang, Guestrin, «Training deep nets with sublinear memory cost», 2016, arXiv:1604.06174, algorithm 3.
With x the bytes kept and y those of the largest segment, the paper searches b on a small grid around √(x·y). Here
the grid also covers everything from one segment to one segment per cut point, so that the plans cover all budgets.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass
from typing import ClassVar

from rematplan.ir import UsageError
from rematplan.planner.blocks.forward_graph import ForwardGraph, bits
from rematplan.planner.blocks.lower_sets import blocks_of, boundaries, cut_points
from rematplan.planner.core.strategy import Progress
from rematplan.planner.strategies.block_strategy import BlockStrategy, Chain


@dataclass(frozen=True)
class ChenGreedy(BlockStrategy):
    """Divide the forward into blocks greedily: end a block at the first cut point where its bytes exceed a threshold
    (Chen et al. 2016, algorithm 3), for many thresholds.

    A cut point is a node through which alone what is before it communicates with what is after it. O(grid · nodes).

    Options: ``grid``: the number of thresholds; half of them cover the whole range, half are near √(x·y), for x
    bytes of cut points and y bytes of the largest block.
    """

    name: ClassVar[str] = "chen_greedy"
    summary: ClassVar[str] = "cut when the accumulated bytes exceed a threshold (Chen et al. 2016, alg. 3)"

    grid: int = 32

    def __post_init__(self) -> None:
        if self.grid < 1:
            raise UsageError(f"{self.name}: grid is {self.grid}; it must be at least 1")

    def chains(self, view: ForwardGraph, progress: Progress) -> Iterable[Chain]:
        """Return one chain of lower sets for each threshold; equal chains included."""
        cuts = cut_points(view)
        largest, total = max(view.bytes, default=0), sum(view.bytes)
        wide = _geometric(max(1, largest // 2), max(1, total), max(1, self.grid // 2))
        chains = [_sweep(view, cuts, b) for b in wide]
        kept, segment = min((_price(view, chain) for chain in chains), key=sum)
        near = math.sqrt(kept * segment)
        for b in _geometric(near / math.sqrt(2), near * math.sqrt(2), self.grid // 2):
            progress(len(chains) / self.grid, f"threshold {b:.3g} bytes")
            chains.append(_sweep(view, cuts, b))
        return chains


def _geometric(low: float, high: float, count: int) -> list[float]:
    if count < 2 or low <= 0:
        return [high] * count
    return [low * (high / low) ** (i / (count - 1)) for i in range(count)]


def _sweep(view: ForwardGraph, cuts: tuple[int, ...], threshold: float) -> Chain:
    """Return the chain of algorithm 3, which ends a block at each cut point where the block's bytes exceed
    ``threshold``."""
    chain: list[int] = []
    bytes_ = 0
    for block, cut in zip(blocks_of(cuts), cuts, strict=True):
        bytes_ += sum(view.bytes[v] for v in bits(block))
        if bytes_ > threshold:
            chain.append(cut)
            bytes_ = 0
    return (*chain, view.everything)


def _price(view: ForwardGraph, chain: Chain) -> tuple[int, int]:
    """Return the paper's x and y: the bytes of the cut points, and of the largest segment."""
    kept = sum(view.bytes[v] for v in bits(boundaries(view, chain)))
    return kept, max(sum(view.bytes[v] for v in bits(block)) for block in blocks_of(chain))
