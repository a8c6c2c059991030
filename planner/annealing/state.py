"""The arrays of the annealer, and functions that query them. A *run* is one execution of an op or inverse,
here called ops.

A run reads a tensor from the latest earlier run that writes it. The tensor is live from there to the last
read before it is written again, as in `schedule.with_frees`. A virtual last op reads all outputs.

A run is a *node* in a slot; about half of the slots are empty, so that insertions move few. The *penalty* is
Σ max(0, mem − cap) over slots. Sizes are whole float64 below 2^53, so sums are exact.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from rematplan.planner.caches.numba_kernels import inner, vector_inner
from rematplan.planner.core.array_types import Floats, Ints, Words

NO_CAP = 1e300
NO_SLOT = 2**62
NO_RUN = -1  # in place of a run: there is none, or none is left out
BLOCK = 64  # the number of slots that are searched at once
NEARBY = 8  # the number of an op's last runs that a search tries, from the last on
HALF = 0.5  # penalties are whole numbers, so one below this is zero

# Columns of `State.number`.
FREE, LOGGED, MULTI, RUNS, BEST = NUMBERS = range(5)
# Columns of `State.value`.
PENALTY, COST, PRICE, BUDGET, BEST_COST, CEILING, GROWTH = VALUES = range(7)
# Kinds of log entries.
INSERTED, REMOVED, SHIFTED = range(3)


class Flow(NamedTuple):
    """By tensor, the ops (inverses included) that read and write it, in compressed sparse rows."""

    readers_at: Ints
    """Tensor t is read by ``readers[readers_at[t]:readers_at[t + 1]]``, and written likewise by ``makers``."""
    readers: Ints
    makers_at: Ints
    makers: Ints
    producer: Ints
    """The op that writes the tensor if only one does, else -1."""


class Problem(NamedTuple):
    """The problem as arrays: ops, then inverses, then a virtual op that reads outputs; all are called ops.
    Inputs are left out.
    """

    reads_at: Ints
    """Op i reads ``reads[reads_at[i]:reads_at[i + 1]]``."""
    reads: Ints
    writes_at: Ints
    """Op i writes ``writes[writes_at[i]:writes_at[i + 1]]``."""
    writes: Ints
    flow: Flow
    least: Ints
    """By op: how often every schedule must run it, 0 or 1."""
    once: Ints
    """By op: 1 if it may run only once."""
    several: bool
    """Whether any tensor can be written by several ops."""
    plain: bool
    """Whether there is no backward half. Then chains of recomputations have a largest length: they would grow without
    end."""
    size: Floats
    """By tensor, in memory units."""
    cost: Floats
    """By op, in percent of the base cost."""
    workspace: Floats
    """By op."""
    written: Floats
    """By op: the sum of the sizes of the tensors that it writes."""
    before: Ints
    """By op: the op whose first run must precede its own; -1 if there is none."""
    after: Ints
    """By op: the op whose first run must follow its own; -1 if there is none."""


class Links(NamedTuple):
    """Where each op's runs are in the sequence. Passing fewer arrays than `State` makes compiled calls faster."""

    slot: Ints
    """By node; -1 if it is not in the sequence."""
    prev: Ints
    """By node: the previous run of the same op, or -1."""
    next: Ints
    """By node: the next run of the same op, or -1."""
    first: Ints
    """By op: its first run, or -1."""
    last: Ints
    """By op: its last run; then, by op again, the run at which `far_run_before` begins. Both may be -1. One more array
    would cost the annealer 5 % of its moves."""


class State(NamedTuple):
    """The sequence of runs that the annealer changes, with its memory at each slot. -1 means none."""

    links: Links
    op: Ints
    """By node."""
    runs: Ints
    """By op: how many runs it has."""
    place: Ints
    """By op: its index in ``multi``."""
    stamp: Ints
    """By op: 1 while it is in ``chain``, else 0."""
    at: Ints
    """By slot: its node."""
    mem: Floats
    """By slot: the bytes live."""
    cap: Floats
    """By slot: the bytes that may be live; `NO_CAP` if it is empty."""
    free: Ints
    """Unused node numbers."""
    log: NDArray[np.int64]
    """The edits that can still be undone."""
    multi: Ints
    """The ops that run more often than they must."""
    chain: Ints
    """Scratch space: the ops of a chain of recomputations, then their nodes."""
    queue: Ints
    """Scratch space: nodes whose results may be read by nothing any more."""
    best: Ints
    """The ops of the cheapest sequence within the budget."""
    number: Ints
    """Integers, at `FREE` to `BEST`."""
    value: Floats
    """Floats, at `PENALTY` to `GROWTH`."""
    random: Words
    """The generator's state."""


@vector_inner
def spread(mem: Floats, cap: Floats, low: int, high: int, bytes_: float) -> float:
    """Add ``bytes_`` to the live bytes ``mem`` of slots ``low`` to ``high``, both included, in place. Return the change
    of the penalty: of the bytes beyond ``cap``."""
    change = 0.0
    # Slices, so that indices start at 0: loops with possibly negative indices are not vectorised.
    live, most = mem[low : high + 1], cap[low : high + 1]
    for s in range(live.size):
        over = live[s] - most[s]
        live[s] += bytes_
        then = over + bytes_
        change += (then if then > 0.0 else 0.0) - (over if over > 0.0 else 0.0)
    return change


@vector_inner
def price(mem: Floats, cap: Floats, low: int, high: int, bytes_: float) -> float:
    """Return by how much the penalty would change if ``bytes_`` were added to slots ``low`` to ``high``, both
    included.
    """
    change = 0.0
    live, most = mem[low : high + 1], cap[low : high + 1]
    for s in range(live.size):
        over = live[s] - most[s]
        then = over + bytes_
        change += (then if then > 0.0 else 0.0) - (over if over > 0.0 else 0.0)
    return change


@vector_inner
def first_over(mem: Floats, cap: Floats, start: int) -> int:
    """Return the first slot (position), from slot ``start`` on, whose live bytes ``mem`` exceed its limit ``cap``; -1
    if there is none."""
    for low in range(start, mem.size, BLOCK):
        live, most = mem[low : low + BLOCK], cap[low : low + BLOCK]
        found = 0
        for s in range(live.size):
            found += live[s] > most[s]
        if found > 0:
            s = 0
            while live[s] <= most[s]:
                s += 1
            return low + s
    return -1


@inner
def run_before(L: Links, op: int, slot: int) -> int:
    """Return the latest run of ``op`` before ``slot``; -1 if there is none."""
    node, steps = L.last[op], 0
    while node >= 0 and L.slot[node] >= slot:
        node = L.prev[node]
        steps += 1
        if steps == NEARBY:
            return far_run_before(L, op, slot)
    return int(node)


@inner
def far_run_before(L: Links, op: int, slot: int) -> int:
    """Return the latest run of ``op`` before ``slot``, -1 if there is none. The search begins at the run that the
    previous search for ``op`` found, and notes its result in ``L.last`` for the next one."""
    # In a sequence of 10^5 runs an op has hundreds, and searches that follow each other are mostly near each other.
    begin = L.first.size + op
    node = L.last[begin] if L.last[begin] >= 0 else L.last[op]
    while node >= 0 and L.slot[node] >= slot:
        node = L.prev[node]
    later = L.next[node] if node >= 0 else NO_RUN
    while later >= 0 and L.slot[later] < slot:
        node, later = later, L.next[later]
    L.last[begin] = node
    return int(node)


@inner
def copy_before(F: Flow, L: Links, tensor: int, slot: int) -> int:
    """Return the run from which an op at ``slot`` would read ``tensor``; -1 if there is none."""
    latest, place = NO_RUN, -1
    for k in range(F.makers_at[tensor], F.makers_at[tensor + 1]):
        node = run_before(L, F.makers[k], slot)
        if node >= 0 and L.slot[node] > place:
            latest, place = node, L.slot[node]
    return int(latest)


@inner
def copy_stop(F: Flow, L: Links, tensor: int, node: int) -> int:
    """Return the slot at which ``tensor`` is written next after the run ``node``; `NO_SLOT` if it is not."""
    if F.producer[tensor] >= 0:  # one op alone writes it
        later = L.next[node]
        return int(L.slot[later]) if later >= 0 else NO_SLOT
    stop = NO_SLOT
    for k in range(F.makers_at[tensor], F.makers_at[tensor + 1]):
        later = L.last[F.makers[k]]
        while later >= 0 and L.slot[later] > L.slot[node]:
            stop = min(stop, L.slot[later])
            later = L.prev[later]
    return int(stop)


@inner
def last_read(F: Flow, L: Links, tensor: int, start: int, stop: int, skip: int) -> int:
    """Return the slot of the last read of ``tensor`` strictly between ``start`` and ``stop``, by another run than
    ``skip``; ``start`` if there is none."""
    latest = start
    for k in range(F.readers_at[tensor], F.readers_at[tensor + 1]):
        node, steps = L.last[F.readers[k]], 0
        while node >= 0:
            s = L.slot[node]
            if s <= latest:
                break
            if s < stop and node != skip:
                latest = s
                break
            node = L.prev[node]
            steps += 1
            if steps == NEARBY:
                node = far_run_before(L, F.readers[k], stop)
    return int(latest)


@inner
def end_of(F: Flow, L: Links, tensor: int, node: int, skip: int) -> int:
    """Return the slot until which ``tensor`` is live as the run ``node`` writes it. It is the slot of the last read
    before the tensor is written again, or that of ``node`` if there is none. Reads of the run ``skip`` do not count."""
    return last_read(F, L, tensor, L.slot[node], copy_stop(F, L, tensor, node), skip)


@inner
def is_unread(P: Problem, S: State, node: int) -> bool:
    """Return whether no run reads a result of the run ``node`` before it is written again."""
    op = S.op[node]
    for k in range(P.writes_at[op], P.writes_at[op + 1]):
        if end_of(P.flow, S.links, P.writes[k], node, NO_RUN) > S.links.slot[node]:
            return False
    return True


@inner
def node_after(at: Ints, slot: int) -> int:
    """Return the node in the first non-empty slot after ``slot``; there must be one."""
    s = slot + 1
    while at[s] < 0:
        s += 1
    return int(at[s])
