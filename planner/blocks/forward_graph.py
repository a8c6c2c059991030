"""The forward half as a small graph of nodes with a cost and a size, for the block strategies.

A node is a group of forward ops. Single ops would do, but a captured step has many ops that offer no useful choice,
and each multiplies the number of lower sets. Three contractions are applied until none applies. All keep the graph
acyclic by one invariant: a group has the base position of its anchor, and every edge leads from a lower anchor to a
higher one.

- *Side source*: a group without predecessors (a constant, a weight's cast or transpose) joins its earliest
  consumer. No edge leads into it, and its other consumers come after the earliest.
- *Side sink*: a group that no other group reads (running statistics) joins its latest predecessor. No edge leads
  out of it, and its other predecessors come before the latest. One without predecessors (a counter) joins the
  main sink.
- *Pass-through*: a group that only one other group reads, which reads nothing else, joins that group if together
  they are no larger than the first alone (batch norm before ReLU, whose backward reads the ReLU's result and two
  small vectors). The edge joined is the only one out of one node and into the other, so no cycle is closed. As a
  boundary, both together are never worse than the first: they hold no more bytes and save more work.

The main source and sink, which have the most descendants and ancestors, are kept. A side source of more than `SIDE`
ops is kept too, and such a side sink if the backward half reads it: these are second towers and heads, in which a
choice of blocks matters.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property

import numpy as np
from numpy.typing import NDArray

from rematplan.ir import TrainingGraph
from rematplan.planner.arrays.indexed import Indexed, indexed
from rematplan.planner.caches.graph_cache import cached_on

SIDE = 8


@dataclass(frozen=True)
class ForwardGraph:
    """The forward half as a graph whose nodes are groups of ops, in topological order. Sets of nodes are bit masks.

    ``members[v]``: the ops of node v (positions in ``graph.ops``, ascending). ``cost[v]``: T_v, the cost of running
    them. ``bytes[v]``: M_v, the size of the tensors that node v writes and an op outside of v reads; graph outputs
    do not count, because they stay resident anyway. ``preds[v]``, ``succs[v]``: the nodes that v reads from, and
    that read from v. ``before[v]``: ``preds[v]`` and the nodes whose random draws must come before those of v.
    """

    members: tuple[tuple[int, ...], ...]
    cost: tuple[float, ...]
    bytes: tuple[int, ...]
    preds: tuple[int, ...]
    succs: tuple[int, ...]
    before: tuple[int, ...]

    def __len__(self) -> int:
        return len(self.members)

    @property
    def everything(self) -> int:
        """The bit mask of all nodes."""
        return (1 << len(self.members)) - 1

    @cached_property
    def sizes(self) -> NDArray[np.int64]:
        """For each node, M_v as an array: the bytes of the tensors that the node writes and an op outside of the
        node reads."""
        return np.array(self.bytes, dtype=np.int64)

    @cached_property
    def ancestors(self) -> tuple[int, ...]:
        """For each node, the bit mask of itself and everything that must come before it."""
        masks: list[int] = []
        for v, before in enumerate(self.before):
            mask = 1 << v
            for u in bits(before):
                mask |= masks[u]
            masks.append(mask)
        return tuple(masks)

    @cached_property
    def descendants(self) -> tuple[int, ...]:
        """For each node, the bit mask of itself and everything that must come after it."""
        masks = [1 << v for v in range(len(self))]
        for v in reversed(range(len(self))):
            for u in bits(self.before[v]):
                masks[u] |= masks[v]
        return tuple(masks)


def bits(mask: int) -> Iterator[int]:
    """Yield the positions of the set bits of a mask, ascending."""
    while mask:
        low = mask & -mask
        yield low.bit_length() - 1
        mask ^= low


def forward_graph(graph: TrainingGraph) -> ForwardGraph:
    """Return the forward half as a graph in which ops that offer no useful choice are grouped; computed once per
    problem.

    It is empty if no op belongs to the forward half.
    """
    return cached_on(graph, "forward_graph", lambda: _contract(indexed(graph)))


def _contract(ix: Indexed) -> ForwardGraph:
    groups = _Groups(ix)
    while groups.merge_sources() or groups.merge_sinks() or groups.merge_pass_throughs():
        pass
    return groups.freeze()


class _Groups:
    """Groups during the contraction, named by their anchors, and the edges between them."""

    def __init__(self, ix: Indexed) -> None:
        self.ix = ix
        self.members = {o: [o] for o, forward in enumerate(ix.forward) if forward}
        self.data: dict[int, set[int]] = {o: set() for o in self.members}
        self.preds: dict[int, set[int]] = {o: set() for o in self.members}
        self.succs: dict[int, set[int]] = {o: set() for o in self.members}
        for o in self.members:
            self.data[o] = {ix.producer[t] for t in ix.reads[o] if ix.producer[t] >= 0}
            self.preds[o] = self.data[o] | ({ix.after[o]} if ix.after[o] >= 0 else set())
            for p in self.preds[o]:
                self.succs[p].add(o)

    def merge_sources(self) -> bool:
        """Join small groups without predecessors with their earliest consumers, and return whether any were joined."""
        sources = [g for g in sorted(self.members) if not self.preds[g]]
        reach = self._reach(self.succs, sorted(self.members, reverse=True))
        main = max(sources, key=lambda g: (reach[g].bit_count(), -g), default=-1)
        merged = False
        for g in sources:
            if g != main and self.succs[g] and len(self.members[g]) <= SIDE:
                self._join(g, min(self.succs[g]))
                merged = True
        return merged

    def merge_sinks(self) -> bool:
        """Join groups that no other group reads with their latest predecessors, and return whether any were joined."""
        sinks = [g for g in sorted(self.members) if not self.succs[g]]
        reach = self._reach(self.preds, sorted(self.members))
        main = max(sinks, key=lambda g: (reach[g].bit_count(), g), default=-1)
        merged = False
        for g in sinks:
            if g == main or (len(self.members[g]) > SIDE and self._backward_reads(g)):
                continue
            # A group without predecessors may join any group: it has no edges.
            self._join(g, max(self.preds[g], default=main))
            merged = True
        return merged

    def merge_pass_throughs(self) -> bool:
        """Join groups with their only consumers where that makes no boundary larger, and return whether any were
        joined."""
        merged = False
        for g in sorted(self.members):
            if len(self.succs[g]) != 1:
                continue
            (to,) = self.succs[g]
            if self.preds[to] == {g} and self._bytes(g, to) <= self._bytes(g):
                self._join(g, to)
                merged = True
        return merged

    def freeze(self) -> ForwardGraph:
        """Return the groups as the nodes of a `ForwardGraph`, in topological order."""
        order = sorted(self.members)
        node = {g: v for v, g in enumerate(order)}
        preds = [_mask(node[p] for p in self.data[g] & self.preds[g]) for g in order]
        succs = [0] * len(order)
        for v, mask in enumerate(preds):
            for u in bits(mask):
                succs[u] |= 1 << v
        return ForwardGraph(
            members=tuple(tuple(sorted(self.members[g])) for g in order),
            cost=tuple(sum(self.ix.cost[o] for o in self.members[g]) for g in order),
            bytes=tuple(self._bytes(g) for g in order),
            preds=tuple(preds),
            succs=tuple(succs),
            before=tuple(_mask(node[p] for p in self.preds[g]) for g in order),
        )

    def _join(self, g: int, to: int) -> None:
        self.members[to] += self.members.pop(g)
        for edges, back in ((self.preds, self.succs), (self.succs, self.preds)):
            for other in edges.pop(g):
                back[other].discard(g)
                if other != to:
                    back[other].add(to)
                    edges[to].add(other)
        self.data[to] |= self.data.pop(g)
        self.data[to] -= {g, to}
        for other in self.succs[to]:
            if g in self.data[other]:
                self.data[other] = self.data[other] - {g} | {to}

    def _reach(self, edges: dict[int, set[int]], order: list[int]) -> dict[int, int]:
        masks: dict[int, int] = {}
        for g in order:
            masks[g] = 1 << g
            for other in edges[g]:
                masks[g] |= masks[other]
        return masks

    def _bytes(self, *groups: int) -> int:
        """Return M of several groups taken together: the bytes they write that others read."""
        inside, ix = {o for g in groups for o in self.members[g]}, self.ix
        return sum(
            ix.bytes[t]
            for o in inside
            for t in ix.writes[o]
            if not ix.is_output[t] and any(r not in inside for r in ix.readers[t])
        )

    def _backward_reads(self, g: int) -> bool:
        ix = self.ix
        return any(not ix.forward[r] for o in self.members[g] for t in ix.writes[o] for r in ix.readers[t])


def _mask(nodes: Iterator[int]) -> int:
    mask = 0
    for v in nodes:
        mask |= 1 << v
    return mask
