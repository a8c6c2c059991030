"""The dynamic program over a family of lower sets of `exact_dp` and `approx_dp` (Kusumoto et al., NeurIPS
2019, arXiv:1905.11722).

opt[L, t] is the least bytes cached for the backward by chains of lower sets that end in L and recompute for
time t. M is the bytes and T the cost of a set, ∂(L) its boundary, δ⁺ and δ⁻ its successors and predecessors.
A step goes from L to a larger L′; with V′ = L′ ∖ L and the budget B:

    feasible   opt[L, t] + 2 M(V′) + M(δ⁺(L′) ∖ L′) + M(δ⁻(δ⁺(L′)) ∖ L′) ≤ B
    time       t′ = t + T(V′ ∖ ∂(L′))
    cached     opt[L′, t′] ← min(opt[L, t] + M(∂(L′) ∖ L))

Time-centric plans take the least feasible t for all nodes, memory-centric ones the largest. Unless integer
costs have a sum of at most ``ticks``, a block's time is rounded up to total/``ticks``. O(#L²·ticks) time,
O(#L·ticks) memory.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from rematplan.planner.blocks.forward_graph import ForwardGraph, bits
from rematplan.planner.caches.numba_kernels import kernel
from rematplan.planner.core.array_types import Flags, Ints, Words

NEVER = np.int64(2**62)  # no chain reaches this entry


class Family(NamedTuple):
    """A family of lower sets L_0 = ∅, L_1, … as arrays for compiled code, by rising number of nodes; the last
    has all nodes.
    """

    words: Words
    """By set: a bit mask, 64 nodes per word."""
    bytes: Ints
    """By set: the bytes of its nodes."""
    time: Ints
    """By set: the cost of its nodes, as an integer."""
    transient: Ints
    """By set: the bytes of nodes outside of it that read from it, and of nodes outside that these read."""
    edge_start: Ints
    edge: Ints
    """``edge[edge_start[i] : edge_start[i + 1]]``: the boundary of L_i, its nodes that a node outside of it reads."""
    node_bytes: Ints
    node_time: Ints
    """By node: its cost, as an integer."""
    copies: int
    """How often a block's bytes are charged: 2 for values and gradients, 1 for values."""


@dataclass(frozen=True)
class LowerSetDP:
    """A family of lower sets, prepared for the dynamic program of Kusumoto et al. 2019."""

    masks: tuple[int, ...]
    """The sets as bit masks, by rising number of nodes."""
    family: Family
    """The same sets as arrays."""
    unit: int
    """The cost of one tick, an integer."""
    width: int
    """The number of ticks in the table, from 0 on."""
    charge_last: bool
    """Whether recomputation of the last block counts, as in the paper. A schedule need not recompute it."""

    def least_budget(self) -> int:
        """Return the smallest budget (bytes) that some chain of the family meets by the paper's peak formula, found by
        bisection."""
        low, high = 0, self.most_budget()
        while low < high:
            met, further = _asked(self.family, (low + high) // 2)
            low, high = (low, met) if met < NEVER else (further, high)
        return low

    def most_budget(self) -> int:
        """Return a budget (bytes) that every chain of lower sets of the family meets, by the peak formula of Kusumoto
        et al. 2019."""
        return self.family.copies * int(self.family.bytes[-1]) + int(self.family.transient.max())

    def solve(self, budget: int) -> LowerSetTable:
        """Return the table of the dynamic program for a budget in bytes, which chains do not exceed by the
        paper's peak formula.
        """
        return LowerSetTable(
            self, budget, _fill(self.family, self.unit, budget, self.width, self.charge_last)
        )


@dataclass(frozen=True)
class LowerSetTable:
    """The result of the dynamic program for one budget in bytes."""

    dp: LowerSetDP
    budget: int
    opt: Ints
    """``opt[i, t]``: the least bytes that a chain within the budget keeps if it ends in set i and recomputes
    for t ticks; `NEVER` if there is none.
    """

    def times(self) -> list[int]:
        """Return the ticks for which chains of all nodes within the budget recompute, ascending; none if the
        budget is too small.
        """
        return [int(t) for t in np.flatnonzero(self.opt[-1] < NEVER)]

    def chain(self, time: int) -> tuple[int, ...]:
        """Return a chain L_1 ⊂ … ⊂ L_k of all nodes, as bit masks, that recomputes for ``time`` ticks and
        keeps the least bytes.

        ``time``: an element of `LowerSetTable.times`.
        """
        dp = self.dp
        found = _trace(dp.family, dp.unit, self.budget, self.opt, time, dp.charge_last)
        return tuple(dp.masks[i] for i in found[::-1])


def prepare(
    view: ForwardGraph, masks: Sequence[int], ticks: int, charge_last: bool, gradients: bool = True
) -> LowerSetDP:
    """Prepare the dynamic program of Kusumoto et al. 2019 for the lower sets ``masks``, from ∅ to all nodes by rising
    number of nodes. ``ticks``: the most ticks of the whole cost. ``charge_last``: as in `LowerSetDP`. ``gradients``:
    whether the peak formula charges gradients, too."""
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


def _fine_costs(view: ForwardGraph) -> list[int]:
    """Return the nodes' costs as integers, or as multiples of 2⁻⁴⁰ of their sum if they are no integers or
    their sum is 2⁵³ or more.
    """
    total = sum(view.cost)
    if all(c == int(c) for c in view.cost) and total < 2**53:
        return [int(c) for c in view.cost]
    return [round(c / total * 2**40) for c in view.cost]


def _short_sizes(view: ForwardGraph) -> list[int]:
    """Return the nodes' bytes, rounded up to a larger unit (a power of two) if sums might not fit into 64 bits."""
    shift = max(0, (8 * sum(view.bytes)).bit_length() - 62)
    return [-(-b >> shift) for b in view.bytes]


def _words(masks: Sequence[int], nodes: int) -> Words:
    width = max(1, -(-nodes // 64))
    data = b"".join(mask.to_bytes(8 * width, "little") for mask in masks)
    return np.frombuffer(data, dtype="<u8").reshape(len(masks), width).astype(np.uint64)


def _weigh(chosen: NDArray[Any], weight: Sequence[int]) -> Ints:
    """Return, for each set, the sum of its nodes' weights. ``chosen``, shape (nodes, sets): how often each
    node counts.
    """
    total = np.zeros(chosen.shape[1], dtype=np.int64)
    for row, w in zip(chosen, weight, strict=True):
        total += row * np.int64(w)
    return total


def _boundaries(view: ForwardGraph, member: Flags) -> Flags:
    """Return, for each node and set, whether the node is in the set and a node outside of the set reads it. ``member``
    and the result have shape (nodes, sets)."""
    edges = np.zeros_like(member)
    for v, succs in enumerate(view.succs):
        for w in bits(succs):
            edges[v] |= member[v] & ~member[w]
    return edges


def _gradients(view: ForwardGraph, member: Flags) -> NDArray[np.int8]:
    """Return how often each node counts in each set's ``transient`` bytes. ``member`` and the result have
    shape (nodes, sets).
    """
    # A node outside of the set counts if it reads from the set, and again if such a node reads it.
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
    """Return the bytes that the peak formula charges for the block L_j ∖ L_i, beyond what earlier blocks keep."""
    return int(family.copies * (family.bytes[j] - family.bytes[i]) + family.transient[j])


@kernel
def _step(family: Family, unit: int, i: int, j: int, last_free: bool) -> tuple[int, int]:
    """Return the bytes of new boundary nodes and the ticks (of cost ``unit``) of recomputation, rounded up, of a step
    from L_i to L_j. ``last_free``: whether the step to all nodes recomputes nothing."""
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
    """Return two peaks by the formula: of a chain that fits ``budget`` and caches few bytes, and the least of all steps
    that were rejected. `NEVER` stands for none."""
    # As in `_fill`, without time. Budgets between ``budget`` and the least rejected peak allow the same
    # chains.
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
    """Return `LowerSetTable.opt`. Pairs of sets L_i ⊂ L_j are visited by rising j, then i. ``unit``: the cost of a
    tick; ``width``: the number of ticks. ``charge_last``: whether recomputation of the last block counts."""
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
    """Return the chain of ``opt[-1, t]`` as indices into the family, from all nodes downwards, without ∅."""
    j = len(family.bytes) - 1
    found = []
    while j > 0:
        found.append(j)
        # Any predecessor that explains the entry is correct; the first is taken.
        for i in range(j):
            if not _subset(family.words, i, j):
                continue
            more, ticks = _step(family, unit, i, j, not charge_last)
            at = t - ticks
            if at >= 0 and opt[i, at] <= budget - _need(family, i, j) and opt[i, at] + more == opt[j, t]:
                j, t = i, at
                break
        else:
            raise ValueError("the table has no such chain")
    return np.array(found)
