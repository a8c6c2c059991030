"""The forward half as a small graph of groups of ops, among which block strategies choose.

Groups without a useful choice are joined: sources into their earliest consumer, sinks into their latest
predecessor, and a group into its only consumer. The edges still lead from an anchor to a later one, so the
graph stays acyclic.

The main source and sink stay, as do sources of more than `SIDE` ops, and such sinks if the backward half
reads them: second towers and heads.
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
"""The largest number of ops in a source, or in a sink that the backward half reads, that is joined to another group.
The main source and sink never are."""


@dataclass(frozen=True)
class ForwardGraph:
    """The forward half as a graph of groups of ops, in topological order. Sets of nodes are bit masks."""

    members: tuple[tuple[int, ...], ...]
    """The ops of each node: positions in ``graph.ops``, ascending."""
    cost: tuple[float, ...]
    """T_v: the cost of running the ops of each node once."""
    bytes: tuple[int, ...]
    """M_v: the bytes that an op outside of the node reads, without graph outputs, which stay resident anyway."""
    preds: tuple[int, ...]
    """The nodes whose tensors each node reads."""
    succs: tuple[int, ...]
    """The nodes that read tensors of each node."""
    before: tuple[int, ...]
    """``preds``, and the nodes with the previous op in ``ordered`` (ops whose first runs have a fixed order)."""

    def __len__(self) -> int:
        return len(self.members)

    @property
    def everything(self) -> int:
        """The bit mask of all nodes."""
        return (1 << len(self.members)) - 1

    @cached_property
    def sizes(self) -> NDArray[np.int64]:
        """``bytes`` as an array."""
        return np.array(self.bytes, dtype=np.int64)

    @cached_property
    def ancestors(self) -> tuple[int, ...]:
        """For each node, the bit mask of the node and of all nodes that must run before it."""
        masks: list[int] = []
        for v, before in enumerate(self.before):
            mask = 1 << v
            for u in bits(before):
                mask |= masks[u]
            masks.append(mask)
        return tuple(masks)

    @cached_property
    def descendants(self) -> tuple[int, ...]:
        """For each node, the bit mask of the node and of all nodes that must run after it."""
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
    """Return the forward half as a graph of groups of ops, cached on ``graph``. It has no nodes if no op is
    of the forward half.
    """
    return cached_on(graph, "forward_graph", lambda: _contract(indexed(graph)))


def _contract(ix: Indexed) -> ForwardGraph:
    groups = _Groups(ix)
    while groups.merge_sources() or groups.merge_sinks() or groups.merge_pass_throughs():
        pass
    return groups.freeze()


class _Groups:
    """The groups of forward ops while they are joined, by anchor, which is one of a group's ops."""

    def __init__(self, ix: Indexed) -> None:
        self.ix = ix
        self.members = {o: [o] for o, forward in enumerate(ix.forward) if forward}
        # The groups whose tensors a group reads. ``preds`` also has that of the previous op in ``ordered``.
        self.data: dict[int, set[int]] = {o: set() for o in self.members}
        self.preds: dict[int, set[int]] = {o: set() for o in self.members}
        self.succs: dict[int, set[int]] = {o: set() for o in self.members}
        for o in self.members:
            self.data[o] = {ix.producer[t] for t in ix.reads[o] if ix.producer[t] >= 0}
            self.preds[o] = self.data[o] | ({ix.after[o]} if ix.after[o] >= 0 else set())
            for p in self.preds[o]:
                self.succs[p].add(o)

    def merge_sources(self) -> bool:
        """Join each group that has no predecessors and at most `SIDE` ops to its earliest consumer. The group with the
        most descendants stays, as do groups without consumers. Return whether any were joined."""
        sources = [g for g in sorted(self.members) if not self.preds[g]]
        reach = self._reach(self.succs, sorted(self.members, reverse=True))
        # The group with the most descendants.
        main = max(sources, key=lambda g: (reach[g].bit_count(), -g), default=-1)
        merged = False
        for g in sources:
            if g != main and self.succs[g] and len(self.members[g]) <= SIDE:
                self._join(g, min(self.succs[g]))
                merged = True
        return merged

    def merge_sinks(self) -> bool:
        """Join each group that no group reads to its latest predecessor; one without predecessors joins the group with
        the most ancestors. That group stays, as do groups of more than `SIDE` ops that the backward half reads. Return
        whether any were joined."""
        sinks = [g for g in sorted(self.members) if not self.succs[g]]
        reach = self._reach(self.preds, sorted(self.members))
        # The group with the most ancestors.
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
        """Join each group that has one consumer alone with this consumer, and return whether any were joined. The
        consumer must read no other group, and both together pass no more bytes to others than the group did."""
        merged = False
        for g in sorted(self.members):
            if len(self.succs[g]) != 1:
                continue
            (to,) = self.succs[g]
            # As a block's boundary, both are never worse than the first: for example batch norm before ReLU.
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
        """Move the ops of group ``g`` and its edges to group ``to``."""
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
        """Return the bytes of the tensors that the ``groups`` write and that an op outside of all of them reads. Graph
        outputs do not count."""
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
