"""The compiled loop of `exhaustive`: A* over sets of resident tensors, each a mask of at most `MOST_BITS` bits."""

from __future__ import annotations

from heapq import heappop, heappush
from typing import NamedTuple, TypeVar

import numpy as np

from rematplan.planner.caches.numba_kernels import inner, unlocked
from rematplan.planner.core.array_types import Floats, Ints

MOST_BITS = 63
"""Masks are signed integers of 64 bits."""
LOOKS = 32
"""The search looks at up to this multiple of the number of states that it may keep: others are known or cost too
much."""
MOST_FREED = 1 << 16
"""It gives up if an op may run after freeing any of so many minimal sets of tensors."""
FACTOR, SHIFT = 0x9E3779B97F4A7C15 - (1 << 64), 29

Numbers = TypeVar("Numbers", Ints, Floats)


class Masks(NamedTuple):
    """A problem: tensors that are not inputs, and marks of ops that have run, are bits."""

    reads: Ints
    """By op or inverse."""
    writes: Ints
    """By op or inverse, with its mark."""
    cost: Floats
    workspace: Ints
    barred: Ints
    """By op or inverse: it may not run in a state with one of these bits."""
    first: Ints
    """By op or inverse: its own mark. If that is set, ``later`` does not matter."""
    later: Ints
    """By op or inverse: it may not run for the first time in a state with one of these bits."""
    bit: Ints
    """The tensors of more than 0 bytes, largest first: each a mask of one bit."""
    bytes: Ints
    """Their sizes."""
    alone: Ints
    """By op, last first: what it alone can write."""
    goal: int
    useful: int
    """What a state keeps: what is read, the goal, and marks."""


@unlocked
def search(problem: Masks, room: int, below: float, most_states: int) -> tuple[bool, float, Ints]:
    """Return whether the search ended within ``most_states`` states, the least cost of a schedule, and its ops and
    inverses in order. The cost is infinite if none that costs less than ``below`` fits. ``room``: the budget without
    inputs, in bytes."""
    sets, costs = np.zeros(1024, np.int64), np.zeros(1024)
    came, by = np.zeros(1024, np.int64), np.zeros(1024, np.int64)
    table = np.full(2048, -1, np.int64)
    table[_slot(table, sets, 0)] = 0
    freed = np.zeros(MOST_FREED, np.int64)
    queue = [(_floor(problem, 0), -0.0, 0)]
    known, looks, none = 1, 0, np.zeros(0, np.int64)
    while queue:
        bound, spent, state = heappop(queue)
        cost, held = -spent, sets[state]
        if bound >= below:
            break
        if cost > costs[state]:
            continue
        if held & problem.goal == problem.goal:
            return True, cost, _path(came, by, state)
        over = _total(problem, held) - room
        for op in range(problem.reads.size):
            reads, writes = problem.reads[op], problem.writes[op]
            if held & reads != reads or not writes & problem.useful & ~held or held & problem.barred[op]:
                continue
            if held & problem.later[op] and not held & problem.first[op]:
                continue
            total, during = cost + problem.cost[op], (held | writes) & problem.useful
            # A resident tensor does no harm until an op needs its bytes, so minimal sets are freed, and no earlier.
            short = over + _total(problem, writes & ~held) + problem.workspace[op]
            count = _minimal_sets(problem, held & ~(reads | writes), short, freed)
            looks += count
            if count == MOST_FREED or looks > LOOKS * most_states:
                return False, np.inf, none
            for i in range(count):
                then = during & ~freed[i]
                slot = _slot(table, sets, then)
                if table[slot] >= 0 and total >= costs[table[slot]]:
                    continue
                bound = total + _floor(problem, then)
                if bound >= below:
                    continue
                if table[slot] < 0:
                    if known == most_states:
                        return False, np.inf, none
                    if known == sets.size:
                        sets, costs, came, by = _twice(sets), _twice(costs), _twice(came), _twice(by)
                        table = _filled(sets, 2 * sets.size, known)
                        slot = _slot(table, sets, then)
                    table[slot], sets[known] = known, then
                    known += 1
                found = table[slot]
                costs[found], came[found], by[found] = total, state, op
                heappush(queue, (bound, -total, found))
    return True, np.inf, none


@unlocked
def _minimal_sets(problem: Masks, held: int, short: int, freed: Ints) -> int:
    """Write into ``freed`` the minimal subsets of ``held`` whose bytes sum to at least ``short`` (the empty set if that
    is not positive). Return how many: at most as many as ``freed`` has places."""
    count, depth = 0, 0
    # By depth: the set so far, the bytes that it lacks, the bytes of the tensors not tried yet, the next tensor.
    chosen, lacks = np.zeros(MOST_BITS + 1, np.int64), np.zeros(MOST_BITS + 1, np.int64)
    rest, at = np.zeros(MOST_BITS + 1, np.int64), np.zeros(MOST_BITS + 1, np.int64)
    lacks[0], rest[0] = short, _total(problem, held)
    while depth >= 0 and count < freed.size:
        if lacks[depth] <= 0:
            freed[count] = chosen[depth]
            count += 1
            depth -= 1
        elif rest[depth] < lacks[depth]:
            depth -= 1
        else:
            i = at[depth]
            at[depth] += 1
            if held & problem.bit[i]:
                rest[depth] -= problem.bytes[i]
                chosen[depth + 1], lacks[depth + 1] = (
                    chosen[depth] | problem.bit[i],
                    lacks[depth] - problem.bytes[i],
                )
                rest[depth + 1], at[depth + 1] = rest[depth], i + 1
                depth += 1
    return count


@inner
def _total(problem: Masks, mask: int) -> int:
    """Return the bytes of a set of tensors."""
    total = 0
    for i in range(problem.bit.size):
        if mask & problem.bit[i]:
            total += problem.bytes[i]
    return total


@inner
def _floor(problem: Masks, mask: int) -> float:
    """Return a lower bound of the cost from a state to the end: the ops that alone can write what is missing."""
    cost, missing, ops = 0.0, problem.goal & ~mask, problem.alone.size
    for i in range(ops):
        if problem.alone[i] & missing:
            cost += problem.cost[ops - 1 - i]
            missing |= problem.reads[ops - 1 - i] & ~mask
    return cost


@inner
def _slot(table: Ints, sets: Ints, mask: int) -> int:
    """Return the place in the hash table of the state ``mask``: its own, or an empty one for it."""
    slot = (mask * FACTOR >> SHIFT) & (table.size - 1)
    while table[slot] >= 0 and sets[table[slot]] != mask:
        slot = (slot + 1) & (table.size - 1)
    return slot


@unlocked
def _filled(sets: Ints, size: int, known: int) -> Ints:
    """Return a hash table of ``size`` places with the first ``known`` states."""
    table = np.full(size, -1, np.int64)
    for state in range(known):
        table[_slot(table, sets, sets[state])] = state
    return table


@unlocked
def _twice(array: Numbers) -> Numbers:
    """Return a copy of an array with as many further places."""
    longer = np.zeros(2 * array.size, array.dtype)
    for i in range(array.size):
        longer[i] = array[i]
    return longer


@unlocked
def _path(came: Ints, by: Ints, state: int) -> Ints:
    """Return the ops and inverses that lead from the first state to ``state``."""
    steps, at = 0, state
    while at:
        steps, at = steps + 1, came[at]
    path, at = np.zeros(steps, np.int64), state
    for i in range(steps - 1, -1, -1):
        path[i], at = by[at], came[at]
    return path
