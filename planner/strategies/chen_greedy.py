"""The strategy `chen_greedy`: end a block at the first cut point at which its bytes exceed a threshold b
(Chen et al. 2016, algorithm 3).

The paper tries b around √(x·y), for x bytes kept and y of the largest block. Here half of the thresholds are
elsewhere, for plans of small and large budgets.
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
    """Divide the forward into blocks greedily: end a block at the first cut point at which its bytes exceed a threshold
    (Chen et al. 2016, algorithm 3). Many thresholds are tried, in O(grid · nodes) time.

    A cut point is a node v through which all data passes: the nodes that must run after v read only v and each other.

    Options: ``grid``: the number of thresholds. Half of them, rounded down but at least one, form a geometric
    progression from half the bytes of the largest node to the bytes of all nodes. The others are near √(x·y), where
    x is the number of bytes kept between blocks, and y the bytes of the largest block. x and y are taken from the
    division into blocks with the smallest x + y among those that the first half of the thresholds gives.
    """

    name: ClassVar[str] = "chen_greedy"
    summary: ClassVar[str] = "cut when the accumulated bytes exceed a threshold (Chen et al. 2016, alg. 3)"

    grid: int = 32

    def __post_init__(self) -> None:
        if self.grid < 1:
            raise UsageError(f"{self.name}: grid is {self.grid}; it must be at least 1")

    def chains(self, view: ForwardGraph, progress: Progress) -> Iterable[Chain]:
        """Return one chain of lower sets for each threshold. Several thresholds may have the same chain."""
        cuts = cut_points(view)
        largest, total = max(view.bytes, default=0), sum(view.bytes)
        wide = _geometric(max(1, largest // 2), max(1, total), max(1, self.grid // 2))
        chains = [_sweep(view, cuts, b) for b in wide]
        kept, segment = min((_price(view, chain) for chain in chains), key=sum)
        near = math.sqrt(kept * segment)
        for b in _geometric(near / math.sqrt(2), near * math.sqrt(2), self.grid - len(wide)):
            progress(len(chains) / self.grid, f"threshold {b:.3g} bytes")
            chains.append(_sweep(view, cuts, b))
        return chains


def _geometric(low: float, high: float, count: int) -> list[float]:
    """Return ``count`` numbers from ``low`` to ``high`` in geometric progression; only ``high``, repeated, if ``low``
    is not positive or ``count`` is 1."""
    if count < 2 or low <= 0:
        return [high] * count
    return [low * (high / low) ** (i / (count - 1)) for i in range(count)]


def _sweep(view: ForwardGraph, cuts: tuple[int, ...], threshold: float) -> Chain:
    """Return the chain that ends a block at each cut point at which the block's bytes exceed ``threshold``
    (algorithm 3).
    """
    chain: list[int] = []
    bytes_ = 0
    for block, cut in zip(blocks_of(cuts), cuts, strict=True):
        bytes_ += sum(view.bytes[v] for v in bits(block))
        if bytes_ > threshold:
            chain.append(cut)
            bytes_ = 0
    return (*chain, view.everything)


def _price(view: ForwardGraph, chain: Chain) -> tuple[int, int]:
    """Return the bytes of a chain's boundary nodes and of its largest block: x and y of algorithm 3."""
    kept = sum(view.bytes[v] for v in bits(boundaries(view, chain)))
    return kept, max(sum(view.bytes[v] for v in bits(block)) for block in blocks_of(chain))
