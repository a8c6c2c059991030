"""Lower a partition to a schedule. A partition divides the forward half into blocks, and states which of their tensors
stay resident until the backward half; the others are dropped and recomputed.

The forward half runs block by block. Between forward and backward, the kept tensors, the tensors of the last block and
the graph outputs are resident. Backward ops run by falling stage, ops of the same stage in the order without
recomputation. The stage of a backward op is the smallest of these: the blocks of the dropped tensors that it reads, and
the stages of the backward ops that it depends on. So the order is topological, and all backward ops of a block run
together.

Just before each backward op, those forward ops are recomputed that it needs, with all that these need. So the schedule
is valid for any blocks and any kept tensors. In a chain, a whole block is recomputed at once. In a block with branches,
each branch is recomputed when it is needed. This made the plans for no measured network worse.

Tensors written by an op that must not run again (``never_rerun``) always stay resident.

Only the sequence of ops is chosen here. The frees follow from it (`with_frees`). So if a dropped tensor is read again
before it is recomputed, it simply stays resident.
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
    """A division of the forward half into blocks, and the choice of the tensors that stay resident between forward and
    backward.

    ``blocks``: for each block, the names of its forward ops. Every forward op is in one block, and no op is in an
    earlier block than an op that it depends on. ``kept``: the names of the tensors that stay resident. The others are
    recomputed block by block during the backward half.
    """

    blocks: tuple[tuple[str, ...], ...]
    kept: tuple[str, ...]


def partition_of(graph: TrainingGraph, chain: Sequence[int], lean: bool = False) -> Partition:
    """Return the blocks of the forward half, and the tensors that stay resident for the backward half, for a chain of
    lower sets L_1 ⊂ … ⊂ L_k of the `forward_graph`. Block i is L_i ∖ L_{i−1}.

    Only tensors of boundary nodes stay resident: nodes that a node of a later block reads. There are two kinds. The
    first are tensors that a later block reads. The second are tensors that only the backward half or the same block
    reads, such as batch norm's saved statistics or max-pool's indices. They stay resident too, because Kusumoto's
    formula charges no recomputation of boundary nodes.

    ``lean``: whether a tensor of the second kind stays resident only if it is small: at most 1/`LEAN_RATIO` as large as
    all tensors of the first kind of its node together.
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
"""With ``lean``, `partition_of` keeps a tensor of a boundary node that no later block reads only if it is at least this
many times smaller than all tensors of the node that later blocks read."""


def _outer(ix: Indexed, view: ForwardGraph) -> list[list[tuple[int, int]]]:
    """Return, for each node of the forward graph, the tensors that it writes and that an op outside of the node reads.
    Each is a pair: the tensor, and the bit mask of the forward nodes that read it."""
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
    """Return the names of the ops in the order in which a partition of the forward half executes them: the forward half
    block by block, then the backward half with recomputation.

    The time is linear in the number of reads and writes, apart from sorting.
    """
    ix = indexed(graph)
    return [ix.ops[o] for o in lower_to_positions(graph, partition)]


def lower_to_positions(graph: TrainingGraph, partition: Partition, compiled: bool = True) -> Ints:
    """Return the order in which a partition of the forward half executes ops, as positions in ``graph.ops``: the
    forward half block by block, then the backward half with recomputation.

    ``compiled``: whether the loops are compiled with numba. If not, plain Python does the same more slowly, without
    time for compilation.
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
    """Return, for each tensor, whether it must stay resident between forward and backward because an op writes it that
    must not run again."""
    once = set(graph.never_rerun)
    kept = {t for op in graph.ops if op.name in once for t in op.writes} if once else ()
    return np.array([t.name in kept for t in graph.tensors], dtype=np.bool_)


class _Numbers(NamedTuple):
    """The position of each op in ``graph.ops`` and of each tensor in ``graph.tensors``, by name."""

    op: dict[str, int]
    tensor: dict[str, int]


def _numbers(ix: Indexed) -> _Numbers:
    return _Numbers({n: o for o, n in enumerate(ix.ops)}, {n: t for t, n in enumerate(ix.tensors)})
