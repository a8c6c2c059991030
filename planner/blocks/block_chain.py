"""A training step as a chain of blocks, with the costs and bytes that a dynamic program over intervals needs.

The bytes are not exact if tensors are freed within a stage or small ones are read out of order. The plans are
valid anyway, and are simulated.
"""

from __future__ import annotations

import math
from collections.abc import Container, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property

import numpy as np

from rematplan.ir import TrainingGraph
from rematplan.planner.arrays.indexed import Indexed, indexed
from rematplan.planner.blocks.forward_graph import forward_graph
from rematplan.planner.blocks.lowering import kept_always
from rematplan.planner.core.array_types import Floats, Ints

Groups = tuple[tuple[int, ...], ...]
"""For each block, or each stage of the backward half, the positions of its ops in ``graph.ops``, in the order in which
they run."""

MINOR = 1 / 64
"""Tensors smaller than this share of the mean bytes of a block do not influence the stage of a backward op."""


@dataclass(frozen=True)
class BlockChain:
    """The forward half as blocks 0 .. n - 1, and the backward half as stages n - 1 .. 0. In stage k the results of
    block k are resident. A block runs in one of three modes. *Passing* keeps the results that later blocks or their
    stages read, *saving* those that later blocks or any stage reads. *Closing* keeps the results whose last reader is
    in the block's own stage or in one that runs later. Bytes do not count tensors that are always resident."""

    forward: Groups
    """The ops of each block, in order."""
    backward: Groups
    """The ops of each stage, in order."""
    cost: Floats
    """The cost of running each block in the mode passing, without ops whose results are not needed."""
    closing_cost: Floats
    """This cost in the mode closing."""
    saved: Ints
    """Bytes that stay of each block after the mode saving."""
    passing: Ints
    """Peak bytes of each block's results while it runs in the mode passing, workspaces included."""
    saving: Ints
    """These bytes in the mode saving."""
    closing: Ints
    """These bytes in the mode closing."""
    stage: Ints
    """Peak bytes during each stage: all gradients, the results of its block that it needs, and the outputs
    that it writes.
    """
    entering: Ints
    """``entering[k]``: bytes of gradients that are resident before stage k - 1; n + 1 entries."""
    left: Ints
    """Bytes of the outputs that each stage writes."""
    crossing: Ints
    """Rows (p, r, b): b bytes that block p writes are last read, outside of p, by block r or its stage."""

    def __len__(self) -> int:
        return len(self.forward)

    @cached_property
    def kept(self) -> Ints:
        """``kept[i, s]``: the bytes that blocks i .. s - 1 write and that block s, a later one, or a stage of
        these reads. Shape (n + 1, n + 1).
        """
        n = len(self)
        change = np.zeros((n + 1, n + 2), dtype=np.int64)
        p, r, size = self.crossing.T
        np.add.at(change, (p, p + 1), size)
        np.add.at(change, (p, r + 1), -size)
        return np.cumsum(np.cumsum(change, axis=1)[::-1], axis=0)[::-1, : n + 1]

    @cached_property
    def kept_behind(self) -> Ints:
        """For each block k, the bytes of blocks 0 .. k that blocks after k or their stages read."""
        change = np.zeros(len(self), dtype=np.int64)
        p, r, size = self.crossing.T
        np.add.at(change, p, size)
        np.add.at(change, r, -size)
        return np.cumsum(change)

    @cached_property
    def kinds(self) -> Ints:
        """For each block, a number that is the same for blocks with equal costs and bytes."""
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
    """Return the forward half, which must not be empty, as at most ``most`` blocks, and the backward half as
    their stages.
    """
    ix = indexed(graph)
    # Nodes of the forward graph, joined where that keeps no more bytes.
    members = _joined(ix, forward_graph(graph).members)
    fine = _chain(graph, ix, members)
    if len(fine) <= most:
        return fine
    # Groups of about equal bytes, which end where few bytes stay resident.
    ends = narrow_places(fine, most)
    groups = (members[a:b] for a, b in zip((0, *ends), ends, strict=False))
    return _chain(graph, ix, tuple(tuple(sorted(o for ops in group for o in ops)) for group in groups))


def narrow_places(chain: BlockChain, most: int) -> list[int]:
    """Return at most ``most`` positions that divide a chain where few bytes are kept, into groups of about equal bytes.
    The end is included. If there are at most ``most`` blocks, all positions are returned."""
    if len(chain) <= most:
        return list(range(1, len(chain) + 1))
    passed = np.cumsum(chain.saved, dtype=np.float64)
    # With two sections, a block that ends at exactly half of the bytes is in the first one: hence `nextafter`.
    share = np.floor(np.nextafter(passed / max(1.0, passed[-1]), 0) * most)
    parts = np.split(np.arange(len(chain)), np.flatnonzero(np.diff(share)) + 1)
    # In each section of about equal bytes, the position before which the blocks keep the fewest bytes for
    # later ones.
    places = [int(part[len(part) - 1 - chain.kept_behind[part][::-1].argmin()]) + 1 for part in parts]
    return [*places[:-1], len(chain)]


def _joined(ix: Indexed, blocks: Groups) -> Groups:
    """Join each block with the next one if no more bytes must stay resident after both than after the first."""
    block = {o: k for k, ops in enumerate(blocks) for o in ops}
    until = [max((block.get(r, len(blocks)) for r in readers), default=-1) for readers in ix.readers]

    def weight(tensors: Iterable[int]) -> int:
        return sum(ix.bytes[t] for t in tensors)

    joined: list[list[int]] = []
    left: list[int] = []  # the tensors that the last joined block keeps for later ones
    for k, ops in enumerate(blocks):
        own = [t for o in ops for t in ix.writes[o] if until[t] > k and not ix.is_output[t]]
        both = [t for t in left if until[t] > k] + own
        # For example a batch norm and the addition that alone reads its result.
        if joined and weight(both) <= weight(left):
            joined[-1] += ops
            left = both
        else:
            joined.append(list(ops))
            left = own
    return tuple(tuple(sorted(ops)) for ops in joined)


def _chain(graph: TrainingGraph, ix: Indexed, forward: Groups) -> BlockChain:
    """Return the chain whose blocks are ``forward``, with the stages of the backward half that follow from these
    blocks."""
    once = kept_always(graph)
    block = {o: k for k, ops in enumerate(forward) for o in ops}
    free = [t for t, p in enumerate(ix.producer) if p in block and not (ix.is_output[t] or once[t])]
    last = {t: max((block[r] for r in ix.readers[t] if r in block), default=-1) for t in free}
    least = MINOR * sum(ix.bytes[t] for t in free) / max(1, len(forward))
    stage_of = _stage_by_op(ix, block, {t: r for t, r in last.items() if ix.bytes[t] >= least}, len(forward))
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
    """Return, for each block, those of its ops that must run to write the tensors in ``wanted`` that belong to this
    block, in order."""
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


def _costs(ix: Indexed, blocks: Groups) -> Floats:
    return np.array([math.fsum(ix.cost[o] for o in ops) for ops in blocks], dtype=np.float64)


def _stage_by_op(
    ix: Indexed, block: Mapping[int, int], last: Mapping[int, int], blocks: int
) -> dict[int, int]:
    """Return, by position of each backward op, the first stage in which the tensors of ``last`` that it reads are
    resident and the backward ops that it follows have run. An op that reads none of these tensors, and writes more
    bytes than it reads, is in the stage of its first dependent. ``block``: by forward op. ``last``: by forward tensor
    that counts, the last block that reads it."""
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
    ix: Indexed, blocks: Groups, counted: Container[int], stay: Container[int], workspace: Sequence[int]
) -> Ints:
    """Return, for each group of ops, the peak bytes of what it writes while it runs, workspaces included.

    ``counted``: the tensors whose bytes count. ``stay``: those that are not freed after their last use in the group.
    """
    peaks = []
    for ops in blocks:
        until = {t: o for o in ops for t in (*ix.writes[o], *ix.reads[o])}
        own, live, peak = {t for o in ops for t in ix.writes[o] if t in counted}, 0, 0
        for o in ops:
            live += sum(ix.bytes[t] for t in ix.writes[o] if t in own)
            peak = max(peak, live + workspace[o])
            live -= sum(
                ix.bytes[t] for t in {*ix.reads[o], *ix.writes[o]} & own if until[t] == o and t not in stay
            )
        peaks.append(peak)
    return np.array(peaks, dtype=np.int64)


def _own(ix: Indexed, stages: Groups, block: Mapping[int, int], saved: Iterable[int]) -> list[set[int]]:
    """Return, for each block, those of its tensors in ``saved`` whose last reader is in the block's own stage, or in a
    stage that runs later."""
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
    """Return `BlockChain.stage`, `entering` and `left`, by a simulation of the stages. ``own``: `_own` of
    each block. ``workspace``: by op.
    """
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
