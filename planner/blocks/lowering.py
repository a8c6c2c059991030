"""Lower a partition of the forward half to a sequence of runs, and so to a schedule.

Forward: block by block. At the loss boundary the kept tensors, the last block's tensors and the graph outputs stay.
Backward: ops are ordered by (−stage, base position). The stage of an op is the lowest block among the dropped
tensors it reads and the stages of the backward ops it depends on. This order is topological and does each block's
backward ops together. Just before a backward op, exactly those forward ops run again that it needs, transitively.
So the result is valid for any blocks and any kept tensors. (In a chain the whole block runs again at once. In a
block with branches, each branch waits until it is needed; no curve of the measured networks got worse by that.)

What a ``never_rerun`` op writes is kept, whatever the partition says.

Only the sequence of runs is chosen here. The frees follow from it (`with_frees`), so a dropped tensor that is read
before its op runs again simply stays.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

from rematplan.ir import TrainingGraph
from rematplan.planner.arrays.csr import Flags, Ints, traffic_of
from rematplan.planner.arrays.indexed import Indexed, indexed
from rematplan.planner.blocks.forward_graph import ForwardGraph, bits, forward_graph
from rematplan.planner.blocks.lower_sets import blocks_of
from rematplan.planner.blocks.lowering_kernel import lowered
from rematplan.planner.caches.graph_cache import cached_on
from rematplan.planner.caches.uncompiled_loops import plain


@dataclass(frozen=True, slots=True)
class Partition:
    """A division of the forward half into blocks, as the block strategies choose it.

    ``blocks``: V_1..V_k, each as the names of its forward ops; together they are all forward ops, and no op is in an
    earlier block than its producers. ``kept``: the names of the tensors that stay resident between forward and
    backward; the others are recomputed block by block.
    """

    blocks: tuple[tuple[str, ...], ...]
    kept: tuple[str, ...]


def partition_of(graph: TrainingGraph, chain: Sequence[int], lean: bool = False) -> Partition:
    """Return the partition of the forward into blocks that a chain of lower sets L_1 ⊂ … ⊂ L_k of the
    `forward_graph` defines: block i is L_i ∖ L_{i−1}.

    Boundary nodes are nodes that a node of a later block reads. Kept are their tensors that a later block reads.
    Kept as well are their tensors that only the backward or the own block reads (batch norm's saved statistics,
    max-pool's indices), because Kusumoto's formula charges no recomputation of boundary nodes. With ``lean``,
    tensors of this second kind are kept only if each is at most 1/`LEAN_RATIO` as large as those of the first kind
    together.
    """
    ix, view = indexed(graph), forward_graph(graph)
    outer = cached_on(graph, "outer", lambda: _outer(ix, view))
    blocks, kept = [], []
    for nodes, mask in zip(blocks_of(chain), chain, strict=True):
        ops: list[int] = []
        for v in bits(nodes):
            ops += view.members[v]
            if view.succs[v] & ~mask:
                kept += _kept_of_node(ix, outer[v], mask, lean)
        blocks.append(tuple(ix.ops[o] for o in sorted(ops)))
    return Partition(tuple(blocks), tuple(ix.tensors[t] for t in sorted(kept)))


LEAN_RATIO = 8
"""With ``lean``, `partition_of` keeps tensors of a boundary node that no later block reads only if they are this
many times smaller than those that a later block reads."""


def _outer(ix: Indexed, view: ForwardGraph) -> list[list[tuple[int, int]]]:
    """For each node, the tensors that ops outside of it read, each with the mask of the forward nodes that read it."""
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


def lower(graph: TrainingGraph, partition: Partition) -> list[str]:
    """Return the sequence of runs (op names) of a partition: forward block by block, then the backward, with
    recomputation.

    It takes time linear in the reads and writes, apart from sorting.
    """
    ix = indexed(graph)
    return [ix.ops[o] for o in lower_to_positions(graph, partition)]


def lower_to_positions(graph: TrainingGraph, partition: Partition, compiled: bool = True) -> Ints:
    """Return the sequence of runs of a partition, as positions in ``graph.ops``: forward block by block, then the
    backward, with recomputation.

    ``compiled``: whether compiled code computes it; else plain Python does, which is slower but needs no
    compilation.
    """
    number = cached_on(graph, "numbers", lambda: _numbers(indexed(graph)))
    block = np.full(len(graph.ops), -1, dtype=np.int64)
    for i, names in enumerate(partition.blocks):
        block[[number.op[name] for name in names]] = i
    kept = kept_always(graph)
    kept[[number.tensor[name] for name in partition.kept]] = True
    runs_of = lowered if compiled else plain(lowered)
    return runs_of(traffic_of(graph), block, len(partition.blocks), kept)


def kept_always(graph: TrainingGraph) -> Flags:
    """Return, for each tensor, whether it stays resident between forward and backward in any case, because an op
    that may run only once writes it."""
    once = set(graph.never_rerun)
    kept = {t for op in graph.ops if op.name in once for t in op.writes} if once else ()
    return np.array([t.name in kept for t in graph.tensors], dtype=np.bool_)


class _Numbers(NamedTuple):
    """Positions by name."""

    op: dict[str, int]
    tensor: dict[str, int]


def _numbers(ix: Indexed) -> _Numbers:
    return _Numbers({n: o for o, n in enumerate(ix.ops)}, {n: t for t, n in enumerate(ix.tensors)})
