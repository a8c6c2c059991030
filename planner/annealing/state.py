"""The state of the sequence annealer, and who serves whom in it.

The sequence of runs, repeats included, is the whole plan: a read is served by the latest run before it that
makes the tensor, and a copy lives from its run to its last read before the next run that makes it
(`schedule.with_frees` has the same rule, and no other choice of frees has a lower peak). A tensor's makers are
the op that writes it and the inverses that bring it back; ops and inverses are alike here, and both are called
ops. A virtual last op reads all outputs.

Runs are nodes with fixed numbers; nodes stand in slots, about half of which are empty, so that an insertion
moves few of them. ``mem[slot]`` is the bytes of the copies alive there, exact for empty slots too;
``cap[slot]`` is what may be alive there (budget − workspace, or `NO_CAP` where the slot is empty). The
penalty is Σ max(0, mem − cap). Sizes are float64 holding integers below 2^53, so sums are exact and the loops
vectorise.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple, TypeVar

import numpy as np
from numpy.typing import NDArray

from rematplan.planner.caches.numba_kernels import borrowing, inner

Ints = NDArray[np.int64]
Floats = NDArray[np.float64]
Randoms = NDArray[np.uint64]

F = TypeVar("F", bound=Callable[..., object])

NO_CAP = 1e300
NO_SLOT = 2**62
BLOCK = 64  # slots that are looked through at once
HALF = 0.5  # penalties are whole bytes; below this they are none

# Columns of `State.number`.
FREE, LOGGED, MULTI, RUNS, BEST = NUMBERS = range(5)
# Columns of `State.value`.
PENALTY, COST, PRICE, BUDGET, BEST_COST, CEILING, GROWTH = VALUES = range(7)
# Kinds of log entries.
INSERTED, REMOVED, SHIFTED = range(3)


def vector_kernel(function: F) -> F:
    """As `inner`, with sums that may be reordered (they are exact in any order).

    No kernel of the annealer may call itself: reloading such a one from the disk cache crashes.
    """
    return borrowing(function, fastmath=True, no_cpython_wrapper=True, no_cfunc_wrapper=True)


def free_kernel(function: F) -> F:
    """As `kernel`, and other Python threads run meanwhile."""
    return borrowing(function, nogil=True)


class Flow(NamedTuple):
    """Who reads and who makes each tensor. ``producer``: its only maker, or -1 if it has several."""

    readers_at: Ints
    readers: Ints
    makers_at: Ints
    makers: Ints
    producer: Ints


class Problem(NamedTuple):
    """The problem as arrays. Tensors that are inputs are left out; op ``n - 1`` is the virtual end.

    ``x_at[i]:x_at[i + 1]`` are the places of row i in ``x``. ``cost`` is in percent of the base cost.
    ``plain``: whether there is no backward half, where chains of recomputation would otherwise grow without end.
    ``several``: whether any tensor has several makers. ``least``: the runs that an op must keep, 1 or, where
    others can make what it makes, 0. ``once``: 1 for ops that may not run again. ``before`` and ``after``: the
    neighbours of an op among those whose first runs must keep their order, or -1.
    """

    reads_at: Ints
    reads: Ints
    writes_at: Ints
    writes: Ints
    flow: Flow
    least: Ints
    once: Ints
    several: bool
    plain: bool
    size: Floats
    cost: Floats
    workspace: Floats
    written: Floats
    before: Ints
    after: Ints


class Links(NamedTuple):
    """Where the runs of each op stand. Indexed by node: its ``slot``, -1 when not in the sequence, the ``prev``
    and ``next`` run of the same op; by op: its ``first`` and ``last`` run.

    Apart from the rest of the state because a call that passes few arrays is quick.
    """

    slot: Ints
    prev: Ints
    next: Ints
    first: Ints
    last: Ints


class State(NamedTuple):
    """The sequence. Indexed by node: ``op``; by op: ``runs place stamp``; by slot: ``at mem cap``."""

    links: Links
    op: Ints
    runs: Ints
    place: Ints
    stamp: Ints
    at: Ints
    mem: Floats
    cap: Floats
    free: Ints
    log: NDArray[np.int64]
    multi: Ints
    chain: Ints
    queue: Ints
    best: Ints
    number: Ints
    value: Floats
    random: Randoms


@vector_kernel
def spread(mem: Floats, cap: Floats, low: int, high: int, bytes_: float) -> float:
    """Add bytes to the slots low..high; returns the change of the penalty."""
    change = 0.0
    # Slices, to count from 0 on: a loop whose indices may be negative is not vectorised.
    held, most = mem[low : high + 1], cap[low : high + 1]
    for s in range(held.size):
        over = held[s] - most[s]
        held[s] += bytes_
        then = over + bytes_
        change += (then if then > 0.0 else 0.0) - (over if over > 0.0 else 0.0)
    return change


@vector_kernel
def price(mem: Floats, cap: Floats, low: int, high: int, bytes_: float) -> float:
    """What `spread` would return, without doing it."""
    change = 0.0
    held, most = mem[low : high + 1], cap[low : high + 1]
    for s in range(held.size):
        over = held[s] - most[s]
        then = over + bytes_
        change += (then if then > 0.0 else 0.0) - (over if over > 0.0 else 0.0)
    return change


@vector_kernel
def first_over(mem: Floats, cap: Floats, start: int) -> int:
    """The first slot from a slot on whose cap is exceeded, or -1."""
    for low in range(start, mem.size, BLOCK):
        held, most = mem[low : low + BLOCK], cap[low : low + BLOCK]
        found = 0
        for s in range(held.size):
            found += held[s] > most[s]
        if found > 0:
            s = 0
            while held[s] <= most[s]:
                s += 1
            return low + s
    return -1


@inner
def run_before(L: Links, op: int, slot: int) -> int:
    """The latest run of an op that stands before a slot, or -1."""
    node = L.last[op]
    while node >= 0 and L.slot[node] >= slot:
        node = L.prev[node]
    return int(node)


@inner
def copy_before(F: Flow, L: Links, tensor: int, slot: int) -> int:
    """The run that serves a read of the tensor at a slot: the latest before it that makes it, or -1."""
    latest, place = -1, -1
    for k in range(F.makers_at[tensor], F.makers_at[tensor + 1]):
        node = L.last[F.makers[k]]
        while node >= 0 and L.slot[node] >= slot:
            node = L.prev[node]
        if node >= 0 and L.slot[node] > place:
            latest, place = node, L.slot[node]
    return int(latest)


@inner
def copy_stop(F: Flow, L: Links, tensor: int, node: int) -> int:
    """The slot of the next run after ``node`` that makes the tensor; beyond all slots if there is none."""
    if F.producer[tensor] >= 0:
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
    """The slot of the last read of a tensor in (start, stop), the node ``skip`` apart; ``start`` if there is
    none."""
    latest = start
    for k in range(F.readers_at[tensor], F.readers_at[tensor + 1]):
        node = L.last[F.readers[k]]
        while node >= 0:
            s = L.slot[node]
            if s <= latest:
                break
            if s < stop and node != skip:
                latest = s
                break
            node = L.prev[node]
    return int(latest)


@inner
def end_of(F: Flow, L: Links, tensor: int, node: int, skip: int) -> int:
    """The slot at which the copy that ``node`` writes is last needed, the node ``skip`` apart (its own slot if
    nothing reads it)."""
    return last_read(F, L, tensor, L.slot[node], copy_stop(F, L, tensor, node), skip)


@inner
def is_unread(P: Problem, S: State, node: int) -> bool:
    """Whether nothing reads any copy that the node writes."""
    op = S.op[node]
    for k in range(P.writes_at[op], P.writes_at[op + 1]):
        if end_of(P.flow, S.links, P.writes[k], node, -1) > S.links.slot[node]:
            return False
    return True


@inner
def node_after(at: Ints, slot: int) -> int:
    """The first node that stands beyond a slot."""
    s = slot + 1
    while at[s] < 0:
        s += 1
    return int(at[s])
