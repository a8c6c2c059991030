"""Lower a partition to a sequence of ops: the forward half by blocks, then the backward half with
recomputation.

A backward op's stage is the smallest block of the dropped tensors that it reads, and of its predecessors'
stages. Ops run by falling stage, which is a topological order. The forward ops that one needs are recomputed
just before it, so any blocks and kept tensors give a valid sequence.

Frees follow from the sequence (`with_frees`): a dropped tensor that is read again before its recomputation
stays resident.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from rematplan.ir import TrainingGraph
from rematplan.planner.arrays.csr import traffic_of
from rematplan.planner.arrays.indexed import Indexed, indexed
from rematplan.planner.blocks.forward_graph import ForwardGraph, bits, forward_graph
from rematplan.planner.blocks.lower_sets import blocks_of
from rematplan.planner.blocks.lowering_kernel import lowered
from rematplan.planner.caches.graph_cache import cached_on
from rematplan.planner.caches.uncompiled_loops import plain
from rematplan.planner.core.array_types import Flags, Ints


@dataclass(frozen=True, slots=True)
class Partition:
    """A division of the forward half into blocks, and the tensors that stay resident for the backward half."""

    blocks: tuple[tuple[str, ...], ...]
    """The names of each block's ops. No op is in an earlier block than an op that it depends on."""
    kept: tuple[str, ...]
    """The names of the tensors that stay, besides outputs and the last block's results. Other tensors that the backward
    half needs are recomputed there."""


def partition_of(graph: TrainingGraph, chain: Sequence[int], lean: bool = False) -> Partition:
    """Return the partition for a chain of lower sets L_1 ⊂ … ⊂ L_k. Tensors of nodes that later blocks read stay
    resident. ``lean``: a tensor of such a node that no later block reads stays only if it is small (`LEAN_RATIO`)."""
    ix, view = indexed(graph), forward_graph(graph)
    outer = cached_on(graph, "outer", lambda: _outer(ix, view))
    blocks, kept = [], []
    for nodes, mask in zip(blocks_of(chain), chain, strict=True):
        ops: list[int] = []
        for v in bits(nodes):
            ops += view.members[v]
            if view.succs[v] & ~mask:
                # Tensors that no later block reads stay too, such as batch norm's statistics: Kusumoto's
                # formula charges no recomputation of boundary nodes.
                kept += _kept_of_node(ix, outer[v], mask, lean)
        blocks.append(tuple(ix.ops[o] for o in sorted(ops)))
    return Partition(tuple(blocks), tuple(ix.tensors[t] for t in sorted(kept)))


LEAN_RATIO = 8
"""Some tensors of a boundary node are read by no later block. With ``lean``, `partition_of` keeps them only if they are
at least this many times smaller than all those of the node that later blocks read."""


def _outer(ix: Indexed, view: ForwardGraph) -> list[list[tuple[int, int]]]:
    """Return, for each node, its tensors that an op outside of the node reads, each with the bit mask of
    forward nodes that read it.
    """
    node = {o: v for v, members in enumerate(view.members) for o in members}
    outer: list[list[tuple[int, int]]] = []
    for v, members in enumerate(view.members):
        tensors = [t for o in members for t in ix.writes[o] if any(node.get(r) != v for r in ix.readers[t])]
        readers = [{node[r] for r in ix.readers[t] if r in node} for t in tensors]
        outer.append([(t, sum(1 << u for u in nodes)) for t, nodes in zip(tensors, readers, strict=True)])
    return outer


def _kept_of_node(ix: Indexed, outer: list[tuple[int, int]], mask: int, lean: bool) -> list[int]:
    crossing = [t for t, readers in outer if readers & ~mask]
    further = [t for t, readers in outer if not readers & ~mask]
    most = sum(ix.bytes[t] for t in crossing) // LEAN_RATIO
    return crossing + [t for t in further if not lean or ix.bytes[t] <= most]


def lower_to_positions(graph: TrainingGraph, partition: Partition, compiled: bool = True) -> Ints:
    """Return the positions of the ops that a partition runs, in order, recomputations included.

    ``compiled``: whether numba compiles the loops; plain Python does the same more slowly.
    """
    op = cached_on(graph, "positions of ops", lambda: _positions(indexed(graph).ops))
    tensor = cached_on(graph, "positions of tensors", lambda: _positions(indexed(graph).tensors))
    block = np.full(len(graph.ops), -1, dtype=np.int64)
    for i, names in enumerate(partition.blocks):
        block[[op[name] for name in names]] = i
    kept = kept_always(graph)
    kept[[tensor[name] for name in partition.kept]] = True
    runs_of = lowered if compiled else plain(lowered)
    return runs_of(traffic_of(graph), block, len(partition.blocks), kept)


def kept_always(graph: TrainingGraph) -> Flags:
    """Return, for each tensor, whether it must stay resident between forward and backward because an op writes it that
    must not run again."""
    once = set(graph.never_rerun)
    kept = {t for op in graph.ops if op.name in once for t in op.writes} if once else ()
    return np.array([t.name in kept for t in graph.tensors], dtype=np.bool_)


def _positions(names: Sequence[str]) -> dict[str, int]:
    return {name: at for at, name in enumerate(names)}
