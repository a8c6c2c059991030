"""Lower sets of the forward graph, as bit masks.

A lower set L contains, with each of its nodes, everything that must come before that node. Lower sets form a
lattice. A chain ∅ ⊂ L₁ ⊂ … ⊂ L_k = V partitions the forward half into blocks V_i = L_i ∖ L_{i−1}.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from rematplan.ir import LatticeTooLarge
from rematplan.planner.blocks.forward_graph import ForwardGraph, bits


def boundary(view: ForwardGraph, mask: int) -> int:
    """Return the boundary ∂(L) of a set of nodes (bit mask): its nodes that a node outside of it reads, as a mask."""
    edge = 0
    for v in bits(mask):
        if view.succs[v] & ~mask:
            edge |= 1 << v
    return edge


def lower_sets(view: ForwardGraph, limit: int, strategy: str) -> tuple[int, ...]:
    """Return all lower sets of a forward graph as bit masks, sorted by their number of nodes, from ∅ to the set V of
    all nodes.

    They are found by adding one node at a time to smaller ones. Sorted by size, every lower set comes after those
    that it contains, so a dynamic program needs a single pass over them.

    Raises:
        LatticeTooLarge: there are more than ``limit`` lower sets; noticed after so many were found. The error names
            ``strategy``.
    """
    after = [0] * len(view)
    for v, before in enumerate(view.before):
        for u in bits(before):
            after[u] |= 1 << v
    start = sum(1 << v for v in range(len(view)) if not view.before[v])
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
    """Return the pruned family of lower sets as bit masks: each node with its ancestors, ∅, and the set V of all
    nodes, sorted by number of nodes. These are at most #V + 2 (Kusumoto et al. 2019).

    If there are more than ``most``, only about ``most`` of them are returned, spread evenly over the bytes they
    contain, ∅ and V included.
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
    """Return the bytes of a set of nodes (bit mask): the sum of M_v. Fast for thousands of nodes."""
    member = np.unpackbits(
        np.frombuffer(mask.to_bytes(len(view) // 8 + 1, "little"), np.uint8), bitorder="little"
    )
    return int(view.sizes @ member[: len(view)])


def by_size(masks: set[int]) -> tuple[int, ...]:
    """Sort sets of nodes (bit masks) by their number of nodes, ties by the value of the mask."""
    return tuple(sorted(masks, key=lambda m: (m.bit_count(), m)))


def boundaries(view: ForwardGraph, chain: Sequence[int]) -> int:
    """Return the union U_k = ∪ ∂(L_i) of the boundaries of a chain of lower sets, as a bit mask: the nodes that a
    later block reads.

    ``chain``: L_1 ⊂ … ⊂ L_k as bit masks.
    """
    edge = 0
    for block, mask in zip(blocks_of(chain), chain, strict=True):
        for v in bits(block):
            if view.succs[v] & ~mask:
                edge |= 1 << v
    return edge


def blocks_of(chain: Sequence[int]) -> list[int]:
    """Return the blocks V_i = L_i ∖ L_{i−1} of a chain of lower sets L_1 ⊂ … ⊂ L_k, all as bit masks; L_0 = ∅ is not
    in the chain."""
    return [mask & ~below for below, mask in zip((0, *chain), chain, strict=False)]


def cut_points(view: ForwardGraph) -> tuple[int, ...]:
    """Return the lower sets that have a single node v as their boundary, through which alone they communicate with
    all other nodes. They are bit masks, each containing the one before; ∅ and the set of all nodes are left out.

    Such a set consists of v and all nodes that need not come after v. Of two nodes that are parallel to each other
    only the first is used.
    """
    read_after = [0] * len(view)  # what the nodes that come after v read
    for v in reversed(range(len(view))):
        for u in bits(view.before[v]):
            read_after[u] |= read_after[v] | view.preds[v]
    cuts: list[int] = []
    for v in range(len(view)):
        mask = view.everything & ~view.descendants[v] | 1 << v
        below = cuts[-1] if cuts else 0
        if below & ~mask == 0 and mask not in (below, view.everything) and mask & read_after[v] == 1 << v:
            cuts.append(mask)
    return tuple(cuts)
