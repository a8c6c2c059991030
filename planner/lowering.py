"""The one lowering: from a partition of the forward half to a run sequence, and so to a schedule.

Forward: block by block. At the turn the kept tensors, the last block's and the graph outputs stay. Backward:
the ops are ordered by (−stage, base position), where an op's stage is the earliest block it must wait for:
the least block of the tensors it reads that were dropped, or of the backward ops it depends on. That is a
topological order, and it does each block's backward together. Just before an op, exactly those ops run again
that bring back what it reads; what they need in turn is found by demand, so the result is valid for any
blocks and any kept tensors. (In a chain that is the whole block at once; where a block branches, each branch
waits until it is needed, and no curve of the networks measured got worse by it.)

What ops write that may never run again is kept, whatever the partition says.

Only the run sequence is chosen here. Frees at last uses follow from it (`with_frees`), so a tensor that was
dropped in name but is read before its next run simply stays.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from rematplan.ir import TrainingGraph
from rematplan.planner.forward_graph import ForwardGraph, bits, forward_graph
from rematplan.planner.indexed import Indexed, indexed
from rematplan.planner.lattice import blocks_of
from rematplan.planner.memo import remember


@dataclass(frozen=True, slots=True)
class Partition:
    """What the block strategies choose.

    ``blocks``: V_1..V_k, each the names of its forward ops; together all forward ops, no op before its
    producers' block. ``kept``: the tensors that stay resident at the turn from forward to backward.
    """

    blocks: tuple[tuple[str, ...], ...]
    kept: tuple[str, ...]


def partition_of(graph: TrainingGraph, chain: Sequence[int], lean: bool = False) -> Partition:
    """The canonical partition of a chain of lower sets of the `forward_graph`: blocks V_i, kept U_k = ∪
    ∂(L_j).

    Kept are the boundary's tensors that a later block reads and, as in the formula that charges no
    recomputation of a boundary node, its others that anything outside it reads (batch norm's saved
    statistics, max-pool's indices). ``lean`` keeps of these others only what is small beside the tensors that
    cross.
    """
    ix, view = indexed(graph), forward_graph(graph)
    outer = remember(graph, "outer", lambda: _outer(ix, view))
    blocks, kept = [], []
    for nodes, mask in zip(blocks_of(chain), chain, strict=True):
        ops: list[int] = []
        for v in bits(nodes):
            ops += view.members[v]
            if view.succs[v] & ~mask:
                kept += _kept_of_node(ix, outer[v], mask, lean)
        blocks.append(tuple(ix.ops[o] for o in sorted(ops)))
    return Partition(tuple(blocks), tuple(ix.tensors[t] for t in sorted(kept)))


SMALL = 8
"""A lean partition keeps a further tensor of a boundary node if it is this many times smaller than the
rest."""


def _outer(ix: Indexed, view: ForwardGraph) -> list[list[tuple[int, int]]]:
    """For each node the tensors that ops outside it read, each with the mask of the nodes that read it."""
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
    most = sum(ix.bytes[t] for t in crossing) // SMALL
    return crossing + [t for t in further if not lean or ix.bytes[t] <= most]


def lower(graph: TrainingGraph, partition: Partition) -> list[str]:
    """The run sequence of a partition. Linear in the reads and writes of what runs, but for sorting."""
    ix = indexed(graph)
    return [ix.ops[o] for o in lower_to_positions(graph, partition)]


def lower_to_positions(graph: TrainingGraph, partition: Partition) -> list[int]:
    """`lower`, as positions in the base order."""
    ix = indexed(graph)
    id_of = {name: o for o, name in enumerate(ix.ops)}
    block = [-1] * len(ix.ops)
    for i, names in enumerate(partition.blocks):
        for name in names:
            block[id_of[name]] = i
    kept = {*partition.kept, *(t for name in graph.never_rerun for t in graph.op[name].writes)}
    last = len(partition.blocks) - 1
    resident = [
        p < 0 or name in kept or out or (ix.forward[p] and block[p] == last)
        for name, p, out in zip(ix.tensors, ix.producer, ix.is_output, strict=True)
    ]
    forward = sorted((o for o, f in enumerate(ix.forward) if f), key=lambda o: (block[o], o))
    return forward + _backward(ix, _stages(ix, block, kept), resident)


def _stages(ix: Indexed, block: list[int], kept: set[str]) -> dict[int, int]:
    """The stage of each backward op: no later op's is larger than that of an op it depends on."""
    free = len(ix.ops)  # waits for nothing yet
    comes_back = [
        free if p < 0 or t in kept else block[p] for t, p in zip(ix.tensors, ix.producer, strict=True)
    ]
    stage = dict.fromkeys(ix.backward, free)
    for o in ix.backward:
        at = free
        for p in ix.backward_before[o]:
            at = min(at, stage[p])
        for t in ix.forward_reads[o]:
            at = min(at, comes_back[t])
        stage[o] = at
    # An op that waits for no block runs when the first op that depends on it does: nothing is held early.
    due = dict.fromkeys(ix.backward, 0)
    for o in reversed(ix.backward):
        if stage[o] == free:
            stage[o] = due[o]
        for p in ix.backward_before[o]:
            due[p] = max(due[p], stage[o])
    return stage


def _backward(ix: Indexed, stage: dict[int, int], resident: list[bool]) -> list[int]:
    """The backward ops by stage, each after the forward ops that bring back what it reads."""
    runs: list[int] = []
    for o in sorted(stage, key=lambda o: (-stage[o], o)):
        for r in (*_demand(ix, o, resident), o):
            runs.append(r)
            for t in ix.writes[r]:
                resident[t] = True
    return runs


def _demand(ix: Indexed, op: int, resident: list[bool]) -> list[int]:
    """The forward ops that must run again for ``op`` to run, in the base order."""
    again: set[int] = set()
    waiting = [op]
    while waiting:
        for t in ix.reads[waiting.pop()]:
            p = ix.producer[t]
            if not resident[t] and p not in again and ix.forward[p]:
                again.add(p)
                waiting.append(p)
    return sorted(again)
