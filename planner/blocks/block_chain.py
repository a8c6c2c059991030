"""A training step as a chain of blocks, for plans that run a block more than twice.

A block is a group of consecutive nodes of the forward half. The backward half is divided into stages, one per
block: a backward op belongs to the first stage in which all its reads are there. A chain holds what a dynamic
program over intervals of blocks needs to know about memory. It is not exact where tensors are freed within a stage
or small ones are read out of order. Plans made from it are valid anyway, and the simulator prices them.
"""

from __future__ import annotations

import math
from collections.abc import Container, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property

import numpy as np
from numpy.typing import NDArray

from rematplan.ir import TrainingGraph
from rematplan.planner.arrays.csr import Ints
from rematplan.planner.arrays.indexed import Indexed, indexed
from rematplan.planner.blocks.forward_graph import forward_graph
from rematplan.planner.blocks.lowering import kept_always

Costs = NDArray[np.float64]
Groups = tuple[tuple[int, ...], ...]
"""The positions of ops in ``graph.ops``, grouped by block, in the order in which they run."""

MINOR = 1 / 64
"""Tensors smaller than this share of a block's mean bytes do not influence the stage of a backward op."""


@dataclass(frozen=True)
class BlockChain:
    """The forward half as a chain of blocks 0 .. n - 1, and the backward half as stages n - 1 .. 0, one per block.

    A block can run in three ways. *Passing* keeps what later blocks read. *Saving* also keeps what any stage reads.
    *Closing*, when the stages of later blocks are done, keeps what its own stage and the stages after it read.

    ``forward[k]`` and ``backward[k]``: the ops of block k and of stage k, in order. ``cost[k]`` and
    ``closing_cost[k]``: the cost of block k when passing and when closing. All other fields are bytes, without what
    is always resident. ``passing[k]``, ``saving[k]``, ``closing[k]``: the peak of what block k writes while it runs
    that way. ``saved[k]``: what block k keeps when saving. ``stage[k]``: the peak, in stage k, of gradients, of what
    is still needed of block k, and of the outputs that the stage writes. ``entering[k]``: the gradients that exist
    before stage k - 1 (n + 1 entries). ``left[k]``: the outputs that stage k writes. ``crossing``: rows (p, r, b):
    block p writes b bytes whose last reader outside of p is block r or its stage.
    """

    forward: Groups
    backward: Groups
    cost: Costs
    closing_cost: Costs
    saved: Ints
    passing: Ints
    saving: Ints
    closing: Ints
    stage: Ints
    entering: Ints
    left: Ints
    crossing: Ints

    def __len__(self) -> int:
        return len(self.forward)

    @cached_property
    def kept(self) -> Ints:
        """``kept[i, s]``: the bytes that blocks i .. s - 1 write and keep for block s and later ones; shape (n + 1,
        n + 1) for n blocks."""
        n = len(self)
        change = np.zeros((n + 1, n + 2), dtype=np.int64)
        p, r, size = self.crossing.T
        np.add.at(change, (p, p + 1), size)
        np.add.at(change, (p, r + 1), -size)
        return np.cumsum(np.cumsum(change, axis=1)[::-1], axis=0)[::-1, : n + 1]

    @cached_property
    def kept_behind(self) -> Ints:
        """For each block, the bytes that it and earlier blocks keep for later blocks, if all of them keep only what
        later blocks read."""
        change = np.zeros(len(self), dtype=np.int64)
        p, r, size = self.crossing.T
        np.add.at(change, p, size)
        np.add.at(change, r, -size)
        return np.cumsum(change)

    @cached_property
    def kinds(self) -> Ints:
        """A number for each block; blocks with the same number are equal in all costs and bytes."""
        tails: list[list[tuple[int, int]]] = [[] for _ in self.forward]
        for p, r, size in self.crossing.tolist():
            tails[p].append((r - p, size))
        columns = (
            *(self.cost, self.closing_cost, self.saved, self.passing, self.saving, self.closing),
            *(self.stage, self.entering[1:], self.left),
        )
        number: dict[object, int] = {}
        looks = zip(*(c.tolist() for c in columns), (tuple(sorted(tail)) for tail in tails), strict=True)
        return np.array([number.setdefault(look, len(number)) for look in looks], dtype=np.int64)


def block_chain(graph: TrainingGraph, most: int) -> BlockChain:
    """Return the forward half of a problem as a chain of at most ``most`` blocks, with its backward half as stages.
    The forward half must not be empty.

    A block is a node of the problem's `forward_graph`. Adjacent nodes are joined where that makes no boundary
    larger. If more than ``most`` blocks remain, they are grouped into at most ``most`` of about equal bytes that end
    where few bytes are kept for later ones.
    """
    ix = indexed(graph)
    members = _joined(ix, forward_graph(graph).members)
    fine = _chain(graph, ix, members)
    if len(fine) <= most:
        return fine
    ends = narrow_places(fine, most)
    groups = (members[a:b] for a, b in zip((0, *ends), ends, strict=False))
    return _chain(graph, ix, tuple(tuple(sorted(o for ops in group for o in ops)) for group in groups))


def narrow_places(chain: BlockChain, most: int) -> list[int]:
    """Choose at most ``most`` ends of groups of blocks. An end s means that a group ends in front of block s; the
    last end is that of the chain.

    The blocks are divided into ``most`` shares of equal bytes. In each share, the end behind which the fewest bytes
    are held is chosen.
    """
    if len(chain) <= most:
        return list(range(1, len(chain) + 1))
    passed = np.cumsum(chain.saved, dtype=np.float64)
    share = np.floor(np.nextafter(passed / max(1.0, passed[-1]), 0) * most)
    parts = np.split(np.arange(len(chain)), np.flatnonzero(np.diff(share)) + 1)
    places = [int(part[len(part) - 1 - chain.kept_behind[part][::-1].argmin()]) + 1 for part in parts]
    return [*places[:-1], len(chain)]


def _joined(ix: Indexed, blocks: Groups) -> Groups:
    """Join each block with the next one where both together keep no more bytes than the first alone.

    A tensor that only the next block reads (a batch norm's result before an addition) is short-lived, and the
    boundary behind the next block is as small.
    """
    block = {o: k for k, ops in enumerate(blocks) for o in ops}
    until = [max((block.get(r, len(blocks)) for r in readers), default=-1) for readers in ix.readers]

    def weight(tensors: Iterable[int]) -> int:
        return sum(ix.bytes[t] for t in tensors)

    joined: list[list[int]] = []
    left: list[int] = []  # by the last of them to later ones
    for k, ops in enumerate(blocks):
        own = [t for o in ops for t in ix.writes[o] if until[t] > k and not ix.is_output[t]]
        both = [t for t in left if until[t] > k] + own
        if joined and weight(both) <= weight(left):
            joined[-1] += ops
            left = both
        else:
            joined.append(list(ops))
            left = own
    return tuple(tuple(sorted(ops)) for ops in joined)


def _chain(graph: TrainingGraph, ix: Indexed, forward: Groups) -> BlockChain:
    once = kept_always(graph)
    block = {o: k for k, ops in enumerate(forward) for o in ops}
    free = [t for t, p in enumerate(ix.producer) if p in block and not (ix.is_output[t] or once[t])]
    last = {t: max((block[r] for r in ix.readers[t] if r in block), default=-1) for t in free}
    least = MINOR * sum(ix.bytes[t] for t in free) / max(1, len(forward))
    stage_of = _stages(ix, block, {t: r for t, r in last.items() if ix.bytes[t] >= least}, len(forward))
    for o, k in stage_of.items():
        for t in ix.reads[o]:
            if t in last:
                last[t] = max(last[t], k)
    later = {t for t in free if last[t] > block[ix.producer[t]]}
    saved = later | {t for t in free if any(r not in block for r in ix.readers[t])}
    crossing = [(block[ix.producer[t]], last[t], ix.bytes[t]) for t in later]
    workspace = [op.workspace for op in graph.ops]
    backward = _by_stage(stage_of, len(forward))
    own = _own(ix, backward, block, saved)
    ours = {t for tensors in own for t in tensors}
    stage, entering, left = _stage_peaks(ix, backward, own, workspace)
    passing, closing = _makers(ix, forward, later), _makers(ix, forward, ours)
    return BlockChain(
        forward=forward,
        backward=backward,
        cost=_costs(ix, passing),
        closing_cost=_costs(ix, closing),
        saved=_sums(((block[ix.producer[t]], ix.bytes[t]) for t in saved), len(forward)),
        passing=_peaks(ix, passing, set(free), later, workspace),
        saving=_peaks(ix, forward, set(free), saved, workspace),
        closing=_peaks(ix, closing, set(free), ours, workspace),
        stage=stage,
        entering=entering,
        left=left,
        crossing=np.array(crossing, dtype=np.int64).reshape(-1, 3),
    )


def _makers(ix: Indexed, blocks: Groups, wanted: Container[int]) -> Groups:
    """Return, for each block, the ops that are needed to write the wanted tensors of the block."""
    makers = []
    for ops in blocks:
        read: set[int] = set()
        again = []
        for o in reversed(ops):
            if any(t in wanted or t in read for t in ix.writes[o]):
                again.append(o)
                read.update(ix.reads[o])
        makers.append(tuple(reversed(again)))
    return tuple(makers)


def _costs(ix: Indexed, blocks: Groups) -> Costs:
    return np.array([math.fsum(ix.cost[o] for o in ops) for ops in blocks], dtype=np.float64)


def _stages(ix: Indexed, block: Mapping[int, int], last: Mapping[int, int], blocks: int) -> dict[int, int]:
    """Return the stage of each backward op.

    It is the first stage that is not before that of any backward op it depends on, and in which the forward tensors
    that it reads are there because their own block, or a later reader, runs again then. An op that waits for no
    block and writes more than it reads runs in the stage of the first op that depends on it. ``last``: for each
    tensor that matters, the last block that reads it.
    """
    stage: dict[int, int] = {}
    for o in ix.backward:
        waits = [blocks - 1, *(stage[p] for p in ix.backward_before[o])]
        waits += [max(block[ix.producer[t]], last[t]) for t in ix.reads[o] if t in last]
        stage[o] = min(waits)
    due: dict[int, int] = {}
    for o in reversed(ix.backward):
        grows = sum(ix.bytes[t] for t in ix.writes[o] if not ix.is_output[t]) > sum(
            ix.bytes[t] for t in ix.reads[o] if ix.producer[t] >= 0 and not ix.is_output[t]
        )
        if grows and last.keys().isdisjoint(ix.reads[o]):
            stage[o] = due.get(o, stage[o])
        for p in ix.backward_before[o]:
            due[p] = max(due.get(p, 0), stage[o])
    return stage


def _by_stage(stage: Mapping[int, int], blocks: int) -> Groups:
    rows: list[list[int]] = [[] for _ in range(blocks)]
    for o, k in stage.items():
        rows[k].append(o)
    return tuple(map(tuple, rows))


def _sums(pairs: Iterable[tuple[int, int]], count: int) -> Ints:
    total = np.zeros(count, dtype=np.int64)
    for k, n in pairs:
        total[k] += n
    return total


def _peaks(
    ix: Indexed, blocks: Groups, free: Container[int], stay: Container[int], workspace: Sequence[int]
) -> Ints:
    """Return, for each block, the peak of what it writes while it runs, workspaces included.

    ``free``: tensors that may be freed; those in ``stay`` are not.
    """
    peaks = []
    for ops in blocks:
        until = {t: o for o in ops for t in (*ix.writes[o], *ix.reads[o])}
        own, live, peak = {t for o in ops for t in ix.writes[o] if t in free}, 0, 0
        for o in ops:
            live += sum(ix.bytes[t] for t in ix.writes[o] if t in own)
            peak = max(peak, live + workspace[o])
            live -= sum(
                ix.bytes[t] for t in {*ix.reads[o], *ix.writes[o]} & own if until[t] == o and t not in stay
            )
        peaks.append(peak)
    return np.array(peaks, dtype=np.int64)


def _own(ix: Indexed, stages: Groups, block: Mapping[int, int], saved: Iterable[int]) -> list[set[int]]:
    """Return, for each block, the tensors that it saves for its own stage or a later one."""
    until = {t: k for k in reversed(range(len(stages))) for o in stages[k] for t in ix.reads[o]}
    own: list[set[int]] = [set() for _ in stages]
    for t in saved:
        k = block[ix.producer[t]]
        if until.get(t, len(stages)) <= k:
            own[k].add(t)
    return own


def _stage_peaks(
    ix: Indexed, stages: Groups, own: Sequence[set[int]], workspace: Sequence[int]
) -> tuple[Ints, Ints, Ints]:
    """Compute ``stage``, ``entering`` and ``left`` of `BlockChain`."""
    n = len(stages)
    order = [o for ops in reversed(stages) for o in ops]
    until = {t: o for o in order for t in (*ix.writes[o], *ix.reads[o])}
    gradients = {t for o in order for t in ix.writes[o] if not ix.is_output[t]}
    stage, entering, left = (np.zeros(count, dtype=np.int64) for count in (n, n + 1, n))
    waiting: set[int] = set()
    for k in reversed(range(n)):
        live = waiting | own[k]
        count = sum(ix.bytes[t] for t in live)
        for o in stages[k]:
            left[k] += sum(ix.bytes[t] for t in ix.writes[o] if ix.is_output[t])
            new = {t for t in ix.writes[o] if t in gradients}
            live |= new
            count += sum(ix.bytes[t] for t in new)
            stage[k] = max(stage[k], count + left[k] + workspace[o])
            freed = {t for t in (*ix.reads[o], *new) if t in live and until[t] == o}
            live -= freed
            count -= sum(ix.bytes[t] for t in freed)
        waiting = live & gradients
        entering[k] = sum(ix.bytes[t] for t in waiting)
    return stage, entering, left
