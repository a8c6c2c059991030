"""The dynamic program over a family of lower sets, for `exact_dp` and `approx_dp`.

Kusumoto, Inoue, Watanabe, Akiba, Koyama, «A graph theoretic framework of recomputation algorithms for
memory-efficient backpropagation», NeurIPS 2019, arXiv:1905.11722. opt[L, t] is the least memory cached by a chain
that ends in L and recomputes for time t. From L to a larger L′ of the family, with V′ = L′ ∖ L and the budget B:

    feasible   opt[L, t] + 2 M(V′) + M(δ⁺(L′) ∖ L′) + M(δ⁻(δ⁺(L′)) ∖ L′) ≤ B
    time       t′ = t + T(V′ ∖ ∂(L′))
    cached     opt[L′, t′] ← min(opt[L, t] + M(∂(L′) ∖ L))

Time-centric plans take the least feasible t at V. Memory-centric plans take the largest: their coarser blocks allow
more early frees. The table is dense in t, which counts ticks. Integer costs with a sum of at most ``ticks`` are
exact; otherwise each block's time is rounded up to a multiple of total/``ticks``, so a chain of k blocks is
overcharged by less than k ticks. O(#L²·ticks) time, O(#L·ticks) memory.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from rematplan.planner.blocks.forward_graph import ForwardGraph, bits
from rematplan.planner.blocks.lower_sets import blocks_of, boundary
from rematplan.planner.caches.numba_kernels import kernel

Ints = NDArray[np.int64]
Flags = NDArray[np.bool_]
Words = NDArray[np.uint64]

NEVER = np.int64(2**62)  # no chain reaches this entry


def formula(view: ForwardGraph, chain: Sequence[int], charge_last: bool = True) -> tuple[int, float]:
    """Return the peak (bytes) and recomputation time of a chain of lower sets by the formulas of Kusumoto et al.
    2019.

    ``chain``: L_1 ⊂ … ⊂ L_k as bit masks. ``charge_last``: whether the recomputation of the last block counts in the
    time.
    """
    peak, time, cached = 0, 0.0, 0
    for block, mask in zip(blocks_of(chain), chain, strict=True):
        peak = max(peak, _sum(view.bytes, cached) + 2 * _sum(view.bytes, block) + _transient(view, mask))
        edge = boundary(view, mask)
        if charge_last or mask != view.everything:
            time += sum(view.cost[v] for v in bits(block & ~edge))
        cached |= edge
    return peak, time


class Family(NamedTuple):
    """A family of lower sets L as arrays, by number of nodes, from ∅ to the set V of all nodes.

    ``words``: the sets as bit masks, 64 nodes per word. ``bytes``: M(L). ``time``: T(L), with costs as integers.
    ``transient``: M(δ⁺(L) ∖ L) + M(δ⁻(δ⁺(L)) ∖ L), the bytes of the nodes outside of L that read from L and of those
    that these read. ``edge[edge_start[i] : edge_start[i + 1]]``: the nodes of the boundary ∂(L_i). ``node_bytes``,
    ``node_time``: M_v and T_v of each node. ``copies``: how often a block's bytes are charged: 2 for values and
    gradients, 1 for values only.
    """

    words: Words
    bytes: Ints
    time: Ints
    transient: Ints
    edge_start: Ints
    edge: Ints
    node_bytes: Ints
    node_time: Ints
    copies: int


@dataclass(frozen=True)
class LowerSetDP:
    """A family of lower sets, prepared for the dynamic program of Kusumoto et al. 2019.

    ``masks``: the family as bit masks, by number of nodes, from ∅ to the set V of all nodes. ``family``: the same as
    arrays. ``unit``: integer cost per tick; ticks are the resolution of the recomputation time. ``width``: ticks per
    row of the table. ``charge_last``: whether the last block's recomputation is charged, as in the paper; a schedule
    does not need it.
    """

    masks: tuple[int, ...]
    family: Family
    unit: int
    width: int
    charge_last: bool

    def least_budget(self) -> int:
        """Return the least budget (bytes) that some chain of the family meets by the paper's formula of the peak,
        found by bisection."""
        low, high = 0, self.most_budget()
        while low < high:
            met, further = _asked(self.family, (low + high) // 2)
            low, high = (low, met) if met < NEVER else (further, high)
        return low

    def most_budget(self) -> int:
        """Return a budget (bytes) that every chain of the family meets by the paper's formula of the peak."""
        return self.family.copies * int(self.family.bytes[-1]) + int(self.family.transient.max())

    def solve(self, budget: int) -> Table:
        """Compute opt[L, t], the least cached bytes of chains that end in L and recompute for t ticks, for all L and
        t.

        ``budget``: bytes that the chains must meet by the paper's formula of the peak.
        """
        return Table(self, budget, _fill(self.family, self.unit, budget, self.width, self.charge_last))


@dataclass(frozen=True)
class Table:
    """The least cached bytes ``opt[L, t]`` of chains that end in the lower set L and recompute for t ticks, among
    chains that meet ``budget`` (bytes) by the paper's formula of the peak.

    ``dp``: the family of lower sets; L is an index into it.
    """

    dp: LowerSetDP
    budget: int
    opt: Ints

    def times(self) -> list[int]:
        """Return the recomputation times, in ticks, of the chains that reach V, ascending; empty if the budget is
        too small."""
        return [int(t) for t in np.flatnonzero(self.opt[-1] < NEVER)]

    def chain(self, time: int) -> tuple[int, ...]:
        """Return the chain L₁ ⊂ … ⊂ L_k = V with the least cached bytes among those that recompute for ``time``
        ticks, as bit masks.

        ``time``: an element of `times`.
        """
        dp = self.dp
        found = _trace(dp.family, dp.unit, self.budget, self.opt, time, dp.charge_last)
        return tuple(dp.masks[i] for i in found[::-1])


def prepare(
    view: ForwardGraph, masks: Sequence[int], ticks: int, charge_last: bool, gradients: bool = True
) -> LowerSetDP:
    """Prepare the dynamic program for a family of lower sets.

    Args:
        view: the forward graph.
        masks: the family as bit masks, sorted by number of nodes, from ∅ to the set V of all nodes.
        ticks: the largest number of ticks into which the cost of all nodes is divided.
        charge_last: whether the last block's recomputation is charged, as in the paper.
        gradients: whether a block's gradients and what they wait for are charged, as in the paper. If not, a block
            is charged M(V′), the bytes of its values only, which is closer to the truth where each gradient takes
            the place of the value it is computed from.
    """
    fine, sizes = _fine_costs(view), _short_sizes(view)
    total = sum(fine)
    unit = max(1, -(-total // ticks))
    count = -(-total // unit)
    words = _words(masks, len(view))
    member = np.unpackbits(words.view(np.uint8), axis=1, bitorder="little")[:, : len(view)].T.astype(bool)
    edges = _boundaries(view, member)
    family = Family(
        words=words,
        bytes=_weigh(member, sizes),
        time=_weigh(member, fine),
        transient=_weigh(_gradients(view, member), sizes) if gradients else np.zeros(len(masks), np.int64),
        edge_start=np.concatenate([[0], np.cumsum(edges.sum(axis=0))]).astype(np.int64),
        edge=np.nonzero(edges.T)[1].astype(np.int64),
        node_bytes=np.array(sizes, dtype=np.int64),
        node_time=np.array(fine, dtype=np.int64),
        copies=2 if gradients else 1,
    )
    # Rounding each block up may exceed the total; times far beyond it are useless.
    width = count + 1 if unit == 1 else count + count // 4 + 2
    return LowerSetDP(tuple(masks), family, unit, width, charge_last)


def _sum(values: Sequence[int], mask: int) -> int:
    return sum(values[v] for v in bits(mask))


def _transient(view: ForwardGraph, mask: int) -> int:
    """M(δ⁺(L) ∖ L) + M(δ⁻(δ⁺(L)) ∖ L): what the gradients that leave L wait for."""
    after = 0
    for v in bits(mask):
        after |= view.succs[v]
    before = 0
    for v in bits(after):
        before |= view.preds[v]
    return _sum(view.bytes, after & ~mask) + _sum(view.bytes, before & ~mask)


def _fine_costs(view: ForwardGraph) -> list[int]:
    """Return the costs as integers: unchanged if they are integers, else in units of total · 2⁻⁴⁰."""
    total = sum(view.cost)
    if all(c == int(c) for c in view.cost) and total < 2**53:
        return [int(c) for c in view.cost]
    return [round(c / total * 2**40) for c in view.cost]


def _short_sizes(view: ForwardGraph) -> list[int]:
    """Return the sizes in bytes; in larger units, rounded up, if their sums could exceed 64 bits."""
    shift = max(0, (8 * sum(view.bytes)).bit_length() - 62)
    return [-(-b >> shift) for b in view.bytes]


def _words(masks: Sequence[int], nodes: int) -> Words:
    width = max(1, -(-nodes // 64))
    data = b"".join(mask.to_bytes(8 * width, "little") for mask in masks)
    return np.frombuffer(data, dtype="<u8").reshape(len(masks), width).astype(np.uint64)


def _weigh(chosen: NDArray[Any], weight: Sequence[int]) -> Ints:
    """Return the sum of the nodes' weights for each set; ``chosen`` has shape (nodes, sets), with flags or counts."""
    total = np.zeros(chosen.shape[1], dtype=np.int64)
    for row, w in zip(chosen, weight, strict=True):
        total += row * np.int64(w)
    return total


def _boundaries(view: ForwardGraph, member: Flags) -> Flags:
    """Return ∂(L) for each set, shape (nodes, sets)."""
    edges = np.zeros_like(member)
    for v, succs in enumerate(view.succs):
        for w in bits(succs):
            edges[v] |= member[v] & ~member[w]
    return edges


def _gradients(view: ForwardGraph, member: Flags) -> NDArray[np.int8]:
    """Return `_transient` for each set, shape (nodes, sets): how often a node counts."""
    after, before = np.zeros_like(member), np.zeros_like(member)
    for w, preds in enumerate(view.preds):
        for u in bits(preds):
            after[w] |= member[u]
        for u in bits(preds):
            before[u] |= after[w] & ~member[u]
    return (after & ~member).astype(np.int8) + before.astype(np.int8)


@kernel
def _subset(words: Words, i: int, j: int) -> bool:
    beyond = np.uint64(0)
    for w in range(words.shape[1]):
        beyond |= words[i, w] & ~words[j, w]
    return bool(beyond == np.uint64(0))


@kernel
def _need(family: Family, i: int, j: int) -> int:
    """Return the bytes that the step from L_i to L_j needs in addition to the cached bytes."""
    return int(family.copies * (family.bytes[j] - family.bytes[i]) + family.transient[j])


@kernel
def _step(family: Family, unit: int, i: int, j: int, last_free: bool) -> tuple[int, int]:
    """Return, for the step from L_i to L_j, the bytes added to the cache and the ticks of recomputation."""
    more, work = np.int64(0), family.time[j] - family.time[i]
    for e in range(family.edge_start[j], family.edge_start[j + 1]):
        v = family.edge[e]
        if not (family.words[i, v >> 6] >> np.uint64(v & 63)) & np.uint64(1):
            more += family.node_bytes[v]
            work -= family.node_time[v]
    if last_free and j == len(family.bytes) - 1:
        work = np.int64(0)
    return int(more), int(-(-work // unit))


@kernel
def _asked(family: Family, budget: int) -> tuple[int, int]:
    """Return the budget that a chain within ``budget`` needs (`NEVER` if there is none), and the least that a step
    which exceeds ``budget`` needs (`NEVER` if none does).

    It does the same as `_fill`, but ignores time.
    """
    count = len(family.bytes)
    cached, asked = np.full(count, NEVER), np.full(count, NEVER)
    cached[0] = asked[0] = 0
    further = NEVER
    for j in range(1, count):
        for i in range(j):
            if cached[i] == NEVER or not _subset(family.words, i, j):
                continue
            asks = cached[i] + _need(family, i, j)
            if asks > budget:
                further = min(further, asks)
                continue
            more, _ticks = _step(family, 1, i, j, True)
            if cached[i] + more < cached[j]:
                cached[j], asked[j] = cached[i] + more, max(asked[i], asks)
    return int(asked[-1]), int(further)


@kernel
def _fill(family: Family, unit: int, budget: int, width: int, charge_last: bool) -> Ints:
    """Compute opt by a sweep over pairs L_i ⊂ L_j, ordered by j, then i."""
    count = len(family.bytes)
    opt = np.full((count, width), NEVER)
    opt[0, 0] = 0
    first = np.full(count, width)  # a row has entries for first <= t < end
    end = np.zeros(count, np.int64)
    first[0], end[0] = 0, 1
    for j in range(1, count):
        for i in range(j):
            if first[i] >= end[i] or not _subset(family.words, i, j):
                continue
            most = budget - _need(family, i, j)
            if most < 0:
                continue
            more, ticks = _step(family, unit, i, j, not charge_last)
            before, after = opt[i], opt[j]
            for t in range(first[i], min(end[i], width - ticks)):
                if before[t] <= most:
                    after[t + ticks] = min(after[t + ticks], before[t] + more)
        for t in range(width):
            if opt[j, t] < NEVER:
                first[j] = min(first[j], t)
                end[j] = t + 1
    return opt


@kernel
def _trace(family: Family, unit: int, budget: int, opt: Ints, t: int, charge_last: bool) -> Ints:
    """Return the chain behind opt[V, t], from V down, without ∅. Any predecessor that explains an entry is valid."""
    j = len(family.bytes) - 1
    found = [j]
    while True:
        for i in range(j):
            if not _subset(family.words, i, j):
                continue
            more, ticks = _step(family, unit, i, j, not charge_last)
            at = t - ticks
            if at >= 0 and opt[i, at] <= budget - _need(family, i, j) and opt[i, at] + more == opt[j, t]:
                j, t = i, at
                break
        if j == 0:
            return np.array(found)
        found.append(j)
