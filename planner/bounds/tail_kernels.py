"""The compiled loops of `tail_search`: one step back in time from all states, and the removal of needless states.

A state is a set of tensors that must be resident just before a cut, the cost of runs from there on, and the bytes of
small outputs that further runs can make again there.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from rematplan.planner.caches.numba_kernels import inner, unlocked
from rematplan.planner.core.array_types import Floats, Ints, Words

HELD, MADE, EITHER, NEITHER = 0, 1, 2, 3
"""What a tensor can be in an interval: resident at its start in any case, made in it, either, or neither."""

ONE = np.uint64(1)
FACTOR, SHIFT = np.uint64(0x9E3779B97F4A7C15), np.uint64(29)


class States(NamedTuple):
    """The states at one cut."""

    sets: Words
    costs: Floats
    """As shares of the base cost, without what ``lent`` costs."""
    lent: Ints
    """Bytes of small outputs that count as made again from there on. Each costs ``rate``."""


class Interval(NamedTuple):
    """What can happen from a cut to the next, by tensor."""

    kind: Ints
    """`HELD`, `MADE`, `EITHER` or `NEITHER`."""
    charge: Floats
    """The cost of making it again."""
    loan: Ints
    """The bytes that making it again lends instead, because its op also makes a small output."""
    size: Ints
    reads: Words
    """What the op that makes it reads."""
    together: Words
    """What that op writes."""
    must: Words
    """In one row, what is read in any case."""
    room: int
    """Bytes for tensors that are not `HELD`, just before the cut."""


@unlocked
def step_back(
    states: States, interval: Interval, rate: float, limit: float, most_states: int, most: int
) -> tuple[States, int]:
    """Return the states just before a cut that cost less than ``limit``, from ``states`` before the next cut, and the
    number of branches looked at. If ``most`` branches or ``most_states`` did not suffice, the number is -1 and the
    states are incomplete. ``rate``: the cost of a lent byte, one of a small output that is made again."""
    kind, charge, loan, size, reads, together, must, room = interval
    words, depths = must.shape[1], size.size + 2
    found = States(
        np.zeros((most_states, words), np.uint64), np.zeros(most_states), np.zeros(most_states, np.int64)
    )
    table = np.full(1 << 2 + int(np.log2(most_states)), -1, np.int64)
    needed, held = np.zeros((depths, words), np.uint64), np.zeros((depths, words), np.uint64)
    rooms, spent, paid = np.zeros(depths, np.int64), np.zeros(depths), np.zeros(depths, np.int64)
    count, looked = 0, 0
    for s in range(states.costs.size):
        needed[0], held[0] = states.sets[s] | must[0], 0
        rooms[0], spent[0], paid[0] = room, states.costs[s], states.lent[s]
        depth = 0
        while depth >= 0:
            looked += 1
            if looked > most or count == most_states:
                return found, -1
            w = words - 1  # The tensors that are made last come first.
            while spent[depth] + rate * max(paid[depth], -rooms[depth]) < limit:
                while w >= 0 and not needed[depth, w]:
                    w -= 1
                if w < 0:
                    count += _add(
                        found, table, count, held[depth], spent[depth], max(paid[depth], -rooms[depth])
                    )
                    break
                t = 64 * w + _highest(needed[depth, w])
                bit = ONE << np.uint64(t & 63)
                needed[depth, w] &= ~bit
                if kind[t] == HELD:
                    continue
                if kind[t] == NEITHER:
                    break
                # A frame stays behind in which the tensor is made; the next one goes on, in which it is resident.
                made = depth
                if kind[t] == EITHER:
                    depth += 1
                    needed[depth], held[depth] = needed[made], held[made]
                    held[depth, w] |= bit
                    rooms[depth], spent[depth], paid[depth] = rooms[made] - size[t], spent[made], paid[made]
                    spent[made] += charge[t]
                    paid[made] += loan[t]
                for k in range(words):
                    needed[made, k] = needed[made, k] & ~together[t, k] | reads[t, k]
            depth -= 1
    return States(found.sets[:count], found.costs[:count], found.lent[:count]), looked


@inner
def _highest(word: np.uint64) -> int:
    """Return the position of the highest bit of a word that is not 0."""
    at = 0
    for shift in (32, 16, 8, 4, 2, 1):
        if word >> np.uint64(shift):
            word >>= np.uint64(shift)
            at += shift
    return at


@inner
def _add(found: States, table: Ints, count: int, held: Words, cost: float, lent: int) -> int:
    """Add a state to the first ``count`` states of ``found``, or lower the cost of the same set with the same ``lent``.
    Return the number of added states, 0 or 1. ``lent``: bytes of small outputs that are made again. ``table``: of
    positions in ``found``, by hash."""
    key = np.uint64(lent)
    for k in range(held.size):
        key = (key ^ held[k]) * FACTOR
        key ^= key >> SHIFT
    at = np.int64(key & np.uint64(table.size - 1))
    while table[at] >= 0:
        row = table[at]
        same = found.lent[row] == lent
        for k in range(held.size):
            same = same and found.sets[row, k] == held[k]
        if same:
            found.costs[row] = min(found.costs[row], cost)
            return 0
        at = (at + 1) & (table.size - 1)
    table[at] = count
    found.costs[count], found.lent[count] = cost, lent
    for k in range(held.size):
        found.sets[count, k] = held[k]
    return 1


@unlocked
def undominated(states: States, rate: float) -> States:
    """Return the states without those that need all that another one needs, and cost at least as much at any number of
    lent bytes. ``rate``: the cost of a lent byte, one of a small output that is made again."""
    sets, costs, lent = states
    kept = np.zeros(costs.size, np.int64)
    count = 0
    for s in np.argsort(costs + rate * lent, kind="mergesort"):
        free = True
        for other in kept[:count]:
            more = costs[other] <= costs[s]
            for k in range(sets.shape[1]):
                more = more and not sets[other, k] & ~sets[s, k]
            if more:
                free = False
                break
        if free:
            kept[count] = s
            count += 1
    return States(sets[kept[:count]], costs[kept[:count]], lent[kept[:count]])
