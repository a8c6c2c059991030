"""Lower sets of the forward graph as bit masks: sets that contain all that must run before each of their
nodes.

A chain ∅ ⊂ L_1 ⊂ … ⊂ L_k of all nodes divides the forward half into blocks V_i = L_i ∖ L_{i−1}.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from rematplan.ir import LatticeTooLarge
from rematplan.planner.blocks.forward_graph import ForwardGraph, bits


def lower_sets(view: ForwardGraph, limit: int, strategy: str) -> tuple[int, ...]:
    """Return all lower sets as bit masks, by rising number of nodes, from ∅ to all nodes. If there are more than
    ``limit``, raise `LatticeTooLarge`, which names ``strategy``."""
    after = [0] * len(view)
    for v, before in enumerate(view.before):
        for u in bits(before):
            after[u] |= 1 << v
    start = sum(1 << v for v in range(len(view)) if not view.before[v])
    # One node is added at a time, so a set comes after all that it contains.
    layer = {0: start}  # lower set -> the nodes that may be added to it
    found: list[int] = []
    while layer:
        found.extend(sorted(layer))
        grown: dict[int, int] = {}
        for mask, free in layer.items():
            for v in bits(free):
                larger = mask | 1 << v
                if larger in grown:
                    continue
                freed = sum(1 << w for w in bits(after[v]) if view.before[w] & ~larger == 0)
                grown[larger] = free & ~(1 << v) | freed
                if len(found) + len(grown) > limit:
                    raise LatticeTooLarge(strategy, len(found) + len(grown), limit)
        layer = grown
    return tuple(found)


def pruned_lower_sets(view: ForwardGraph, most: int) -> tuple[int, ...]:
    """Return the pruned family of Kusumoto et al. 2019 by rising number of nodes: ∅, all nodes, and each node
    with its ancestors.

    If these are more than ``most``, about ``most`` are selected, with evenly spread bytes.
    """
    family = by_size({0, view.everything, *view.ancestors})
    if len(family) <= most:
        return family
    total = max(1, sum(view.bytes))
    passed, mark = {0, view.everything}, 0
    for mask in family:
        step = most * bytes_of(view, mask) // total
        if step > mark:
            passed.add(mask)
            mark = step
    return by_size(passed)


def bytes_of(view: ForwardGraph, mask: int) -> int:
    """Return the sum of the sizes M_v of a set of nodes, a bit mask. It is fast also for thousands of nodes."""
    member = np.unpackbits(
        np.frombuffer(mask.to_bytes(len(view) // 8 + 1, "little"), np.uint8), bitorder="little"
    )
    return int(view.sizes @ member[: len(view)])


def by_size(masks: set[int]) -> tuple[int, ...]:
    """Sort sets of nodes (bit masks) by their number of nodes; sets of equal numbers by the value of the bit mask."""
    return tuple(sorted(masks, key=lambda m: (m.bit_count(), m)))


def boundaries(view: ForwardGraph, chain: Sequence[int]) -> int:
    """Return, for a chain L_1 ⊂ … ⊂ L_k of bit masks, the bit mask of the nodes that a node of a later block reads."""
    edge = 0
    for block, mask in zip(blocks_of(chain), chain, strict=True):
        for v in bits(block):
            if view.succs[v] & ~mask:
                edge |= 1 << v
    return edge


def blocks_of(chain: Sequence[int]) -> list[int]:
    """Return the blocks L_1, L_2 ∖ L_1, …, L_k ∖ L_{k−1} of a chain of bit masks, which does not begin with ∅."""
    return [mask & ~below for below, mask in zip((0, *chain), chain, strict=False)]


def cut_points(view: ForwardGraph) -> tuple[int, ...]:
    """Return a chain of lower sets, without ∅ and all nodes. Of each set, the nodes outside of it read exactly one
    node. The chain may be empty."""
    read_after = [0] * len(view)  # what the nodes that come after v read
    for v in reversed(range(len(view))):
        for u in bits(view.before[v]):
            read_after[u] |= read_after[v] | view.preds[v]
    cuts: list[int] = []
    for v in range(len(view)):
        # The node v and all that need not run after it. If two such sets are not nested, the first is taken.
        mask = view.everything & ~view.descendants[v] | 1 << v
        below = cuts[-1] if cuts else 0
        if below & ~mask == 0 and mask not in (below, view.everything) and mask & read_after[v] == 1 << v:
            cuts.append(mask)
    return tuple(cuts)
