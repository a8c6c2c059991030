"""The boundary of a lower set, by its definition."""

from __future__ import annotations

from rematplan.planner.blocks.forward_graph import ForwardGraph, bits


def boundary(view: ForwardGraph, mask: int) -> int:
    """Return the boundary of a set of nodes: the nodes of the set that a node outside of it reads. Both sets are bit
    masks."""
    edge = 0
    for v in bits(mask):
        if view.succs[v] & ~mask:
            edge |= 1 << v
    return edge
