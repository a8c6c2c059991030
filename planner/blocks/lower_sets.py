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
    """Return ∂(L): the nodes of L that a node outside of L reads, as a mask."""
    edge = 0
    for v in bits(mask):
        if view.succs[v] & ~mask:
            edge |= 1 << v
    return edge


def lower_sets(view: ForwardGraph, limit: int, strategy: str) -> tuple[int, ...]:
    """Return all lower sets, sorted by their number of nodes, ∅ and V included.

    They grow node by node from ∅: each non-empty lower set is a smaller one plus one of its maximal nodes. Ordering by
    size is a linear extension of inclusion, so a single sweep of a dynamic program sees every transition; the order of
    discovery would miss some.

    Raises:
        LatticeTooLarge: there are more than ``limit``; noticed after generating that many. The error names
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
    """Return the pruned family: each node with its ancestors, ∅ and V, sorted by number of nodes. At most #V + 2 sets.

    If there are more than ``most``, only some of them are returned, at most about ``most``: in the sorted order, a set
    is kept where its bytes exceed a further ``most``-th of all bytes.
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
    """Return the bytes of a set of nodes; fast for thousands of nodes."""
    member = np.unpackbits(
        np.frombuffer(mask.to_bytes(len(view) // 8 + 1, "little"), np.uint8), bitorder="little"
    )
    return int(view.sizes @ member[: len(view)])


def by_size(masks: set[int]) -> tuple[int, ...]:
    """Sort sets of nodes (bit masks) by their number of nodes, ties by the value of the mask."""
    return tuple(sorted(masks, key=lambda m: (m.bit_count(), m)))


def boundaries(view: ForwardGraph, chain: Sequence[int]) -> int:
    """Return U_k = ∪ ∂(L_i) of a chain: the nodes that a later block reads.

    A node outside of L_j ⊇ L_i is outside of L_i too.
    """
    edge = 0
    for block, mask in zip(blocks_of(chain), chain, strict=True):
        for v in bits(block):
            if view.succs[v] & ~mask:
                edge |= 1 << v
    return edge


def blocks_of(chain: Sequence[int]) -> list[int]:
    """Return V_1..V_k of a rising chain that starts after ∅: the differences of neighbours."""
    return [mask & ~below for below, mask in zip((0, *chain), chain, strict=False)]


def cut_points(view: ForwardGraph) -> tuple[int, ...]:
    """Return the lower sets with a boundary of one node that split the graph in two, as a rising chain without ∅
    and V.

    Node v is a cut point if everything before and everything after it communicates through v alone: the nodes that
    need not come after v form a lower set L with ∂(L) = {v}. In topological order; a node parallel to an earlier
    cut point is left out.
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
