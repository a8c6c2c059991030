"""The dynamic program over a family of lower sets, for the strategies `exact_dp` and `approx_dp`.

Source: Kusumoto, Inoue, Watanabe, Akiba, Koyama, «A graph theoretic framework of recomputation algorithms for
memory-efficient backpropagation», NeurIPS 2019, arXiv:1905.11722. M is the bytes and T the cost of a set of nodes, ∂(L)
the boundary of L, δ⁺ and δ⁻ the successors and predecessors of a set. opt[L, t] is the least bytes that stay resident
(are *cached*) for the backward, over all chains of lower sets that end in L and recompute for time t. A step goes from
L to a larger L′ of the family. With V′ = L′ ∖ L and the budget B:

    feasible   opt[L, t] + 2 M(V′) + M(δ⁺(L′) ∖ L′) + M(δ⁻(δ⁺(L′)) ∖ L′) ≤ B
    time       t′ = t + T(V′ ∖ ∂(L′))
    cached     opt[L′, t′] ← min(opt[L, t] + M(∂(L′) ∖ L))

Time-centric plans take the least feasible t for the set V of all nodes. Memory-centric plans take the largest: their
coarser blocks allow more tensors to be freed early.

The table has an entry for each t, in ticks. If costs are integers with a sum of at most ``ticks``, they are exact.
Otherwise the time of each block is rounded up to a multiple of total/``ticks``, so the time of a chain of k blocks is
too large by less than k ticks. O(#L²·ticks) time, O(#L·ticks) memory.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from rematplan.planner.blocks.forward_graph import ForwardGraph, bits
from rematplan.planner.caches.numba_kernels import kernel

Ints = NDArray[np.int64]
Flags = NDArray[np.bool_]
Words = NDArray[np.uint64]

NEVER = np.int64(2**62)  # no chain reaches this entry


class Family(NamedTuple):
    """A family of lower sets as arrays for compiled code. The sets L_0 = ∅, L_1, … are sorted by their number of nodes;
    the last is the set of all nodes.

    By set: ``words``: a bit mask, 64 nodes per word. ``bytes``: the bytes of its nodes. ``time``: their cost, as an
    integer. ``transient``: further bytes that the formula of Kusumoto et al. 2019 charges: those of nodes outside of
    the set that read from it, and those of nodes outside that these read. ``edge[edge_start[i] : edge_start[i + 1]]``:
    the boundary of L_i, which are its nodes that a node outside of it reads.

    By node: ``node_bytes``, ``node_time``: its bytes and its cost as an integer. ``copies``: how often the bytes of a
    block are charged: 2 for values and gradients, 1 for values only.
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

    ``masks``: the sets as bit masks of nodes, by number of nodes, from ∅ to the set of all nodes. ``family``: the same
    sets as arrays. ``unit``: the cost of one tick, an integer; recomputation is counted in ticks. ``width``: the number
    of ticks in the table, the largest recomputation that it has plus 1. ``charge_last``: whether the recomputation of
    the last block is counted, as in the paper. In a schedule, the last block need not be recomputed.
    """

    masks: tuple[int, ...]
    family: Family
    unit: int
    width: int
    charge_last: bool

    def least_budget(self) -> int:
        """Return the least budget (bytes) that any chain of lower sets of the family meets, by the peak formula of
        Kusumoto et al. 2019. It is found by bisection."""
        low, high = 0, self.most_budget()
        while low < high:
            met, further = _asked(self.family, (low + high) // 2)
            low, high = (low, met) if met < NEVER else (further, high)
        return low

    def most_budget(self) -> int:
        """Return a budget (bytes) that every chain of lower sets of the family meets, by the peak formula of Kusumoto
        et al. 2019."""
        return self.family.copies * int(self.family.bytes[-1]) + int(self.family.transient.max())

    def solve(self, budget: int) -> Table:
        """Run the dynamic program for one budget, and return its table: for each lower set L and number t of ticks
        (units of recomputation time), the least bytes that a chain of lower sets keeps for the backward if it ends in L
        and recomputes for t ticks.

        ``budget``: bytes that the chains must not exceed, by the peak formula of Kusumoto et al. 2019.
        """
        return Table(self, budget, _fill(self.family, self.unit, budget, self.width, self.charge_last))


@dataclass(frozen=True)
class Table:
    """The result of the dynamic program of Kusumoto et al. 2019 for one budget.

    ``opt[i, t]``: the least bytes kept for the backward by a chain of lower sets that ends in the i-th set of the
    family and recomputes for t ticks (units of recomputation time); `NEVER` if there is no such chain. Only chains
    count whose peak is at most ``budget`` (bytes) by the formula of the paper. ``dp``: the family of lower sets.
    """

    dp: LowerSetDP
    budget: int
    opt: Ints

    def times(self) -> list[int]:
        """Return all recomputation times, in ticks of ``dp.unit`` each, for which a chain of lower sets within the
        budget exists that covers all nodes. They are ascending; there are none if the budget is too small."""
        return [int(t) for t in np.flatnonzero(self.opt[-1] < NEVER)]

    def chain(self, time: int) -> tuple[int, ...]:
        """Return a chain of lower sets L_1 ⊂ … ⊂ L_k, as bit masks of nodes, where L_k is the set of all nodes. Of the
        chains within the budget that recompute for ``time`` ticks, it keeps the least bytes for the backward.

        ``time``: an element of `Table.times`.
        """
        dp = self.dp
        found = _trace(dp.family, dp.unit, self.budget, self.opt, time, dp.charge_last)
        return tuple(dp.masks[i] for i in found[::-1])


def prepare(
    view: ForwardGraph, masks: Sequence[int], ticks: int, charge_last: bool, gradients: bool = True
) -> LowerSetDP:
    """Prepare the dynamic program of Kusumoto et al. 2019 for a family of lower sets."""
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
    """Return M(δ⁺(L) ∖ L) + M(δ⁻(δ⁺(L)) ∖ L) of the lower set ``mask``: the bytes of nodes outside of it that read from
    it, and of nodes outside that these read. The peak formula of Kusumoto et al. 2019 charges them in addition to a
    block."""
    after = 0
    for v in bits(mask):
        after |= view.succs[v]
    before = 0
    for v in bits(after):
        before |= view.preds[v]
    return _sum(view.bytes, after & ~mask) + _sum(view.bytes, before & ~mask)


def _fine_costs(view: ForwardGraph) -> list[int]:
    """Return the costs of the nodes as integers. Costs that are not integers, or have a sum of 2⁵³ or more, are
    converted to multiples of 2⁻⁴⁰ of their sum."""
    total = sum(view.cost)
    if all(c == int(c) for c in view.cost) and total < 2**53:
        return [int(c) for c in view.cost]
    return [round(c / total * 2**40) for c in view.cost]


def _short_sizes(view: ForwardGraph) -> list[int]:
    """Return the sizes of the nodes in bytes. If sums of them might not fit into 64 bits, the sizes are in larger units
    (a power of two of bytes), rounded up."""
    shift = max(0, (8 * sum(view.bytes)).bit_length() - 62)
    return [-(-b >> shift) for b in view.bytes]


def _words(masks: Sequence[int], nodes: int) -> Words:
    width = max(1, -(-nodes // 64))
    data = b"".join(mask.to_bytes(8 * width, "little") for mask in masks)
    return np.frombuffer(data, dtype="<u8").reshape(len(masks), width).astype(np.uint64)


def _weigh(chosen: NDArray[Any], weight: Sequence[int]) -> Ints:
    """Return, for each set of nodes, the sum of the weights of its nodes. ``chosen``: shape (nodes, sets): whether, or
    how often, each node counts in each set. ``weight``: by node."""
    total = np.zeros(chosen.shape[1], dtype=np.int64)
    for row, w in zip(chosen, weight, strict=True):
        total += row * np.int64(w)
    return total


def _boundaries(view: ForwardGraph, member: Flags) -> Flags:
    """Return the boundary of each set of nodes: the nodes of the set that a node outside of it reads. ``member`` and
    the result have shape (nodes, sets)."""
    edges = np.zeros_like(member)
    for v, succs in enumerate(view.succs):
        for w in bits(succs):
            edges[v] |= member[v] & ~member[w]
    return edges


def _gradients(view: ForwardGraph, member: Flags) -> NDArray[np.int8]:
    """Return how often each node counts in the ``transient`` bytes of each set (see `Family`), shape (nodes, sets).

    A node outside of a set counts once if it reads from the set, and once if it is read by a node that does.
    ``member``: shape (nodes, sets), the nodes of each set.
    """
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
    """Return the bytes that the peak formula charges for the block L_j ∖ L_i, in addition to the bytes that earlier
    blocks keep. L_i and L_j are sets of the family."""
    return int(family.copies * (family.bytes[j] - family.bytes[i]) + family.transient[j])


@kernel
def _step(family: Family, unit: int, i: int, j: int, last_free: bool) -> tuple[int, int]:
    """Return two numbers for a chain that goes from the lower set L_i to L_j: the bytes of the new boundary nodes,
    which are kept for the backward, and the time for which the other nodes of L_j ∖ L_i are recomputed, in ticks,
    rounded up.

    ``unit``: the cost of a tick. ``last_free``: whether the time is 0 if L_j is the set of all nodes, so that the block
    is the last.
    """
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
    """Return two numbers for the bisection that finds the least budget, both by the peak formula.

    The first is the peak of a chain of lower sets within ``budget`` bytes, or `NEVER` if there is none. The second is
    the least peak above ``budget`` for which a step of a chain was rejected, or `NEVER` if none was; smaller budgets
    than this are no better than ``budget``. The method is that of `_fill`, but ignores time.
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
    """Return the table of the dynamic program. Entry [i, t] is the least bytes that a chain of lower sets within the
    budget keeps for the backward if it ends in the i-th set of the family and recomputes for t ticks (units of
    recomputation time); `NEVER` if there is no such chain. All pairs of sets L_i ⊂ L_j are visited, by increasing j,
    then i.
    """
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
    """Return the chain of lower sets to which the entry ``opt[-1, t]`` of the table belongs: it ends in the set of all
    nodes and recomputes for ``t`` ticks (units of recomputation time). The result has indices into the family, from the
    set of all nodes downwards, without ∅.

    At each step, the first predecessor is taken that explains the entry; any that does is correct.
    """
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
