"""The arrays of the annealer, which does local search over schedules with recomputation, and functions that query them.

A *run* is one execution of an op. The annealer changes a sequence of runs, in which an op may occur several times. The
frees follow from the sequence. An op that reads a tensor gets it from the latest earlier run that writes it. The bytes
are live from that run to the last read before the tensor is written again (`schedule.with_frees` uses the same rule; no
other choice of frees has a lower peak). Inverses are ops that compute a tensor from tensors that were computed from it;
here they are ops like all others. So a tensor may have several *makers*: the op and the inverses that write it. A
virtual last op reads all outputs.

Each run is a *node*, with a number that does not change. Nodes are in slots: positions of the sequence, about half of
which are empty, so that an insertion moves few nodes. ``mem[slot]``: the bytes live at the slot, also where it is
empty. ``cap[slot]``: the bytes that may be live there: the budget minus the workspace of the op, or `NO_CAP` if the
slot is empty. The *penalty* is Σ max(0, mem − cap) over all slots. Sizes are float64 with integer values below 2^53, so
sums are exact and the loops vectorise.
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
BLOCK = 64  # the number of slots that are searched at once
HALF = 0.5  # penalties are whole numbers, so one below this is zero

# Columns of `State.number`.
FREE, LOGGED, MULTI, RUNS, BEST = NUMBERS = range(5)
# Columns of `State.value`.
PENALTY, COST, PRICE, BUDGET, BEST_COST, CEILING, GROWTH = VALUES = range(7)
# Kinds of log entries.
INSERTED, REMOVED, SHIFTED = range(3)


def vector_kernel(function: F) -> F:
    """Compile a function with numba for calls from other compiled functions, and allow numba to reorder its sums. In
    the annealer all sums are of integers, so they are exact in any order.

    The function must not call itself: a recursive function of this kind crashes when it is loaded from the cache on
    disk.
    """
    return borrowing(function, fastmath=True, no_cpython_wrapper=True, no_cfunc_wrapper=True)


def free_kernel(function: F) -> F:
    """Compile a function with numba for calls from Python. The function releases the GIL, so other Python threads can
    run during a call."""
    return borrowing(function, nogil=True)


class Flow(NamedTuple):
    """For each tensor, the ops that read it and the ops that write it, in compressed sparse rows. Inverses (ops that
    compute a tensor from tensors that were computed from it) count as ops.

    Tensor t is read by the ops ``readers[readers_at[t]:readers_at[t + 1]]`` and written by the ops
    ``makers[makers_at[t]:makers_at[t + 1]]``. ``producer[t]``: the op that writes tensor t if only one does, else -1.
    """

    readers_at: Ints
    readers: Ints
    makers_at: Ints
    makers: Ints
    producer: Ints


class Problem(NamedTuple):
    """The planning problem as arrays for the annealer. First the ops are numbered, then the inverses (which recover a
    tensor from tensors computed from it), last a virtual op that reads all outputs. All are called ops below. Inputs
    are left out.

    Op i reads the tensors ``reads[reads_at[i]:reads_at[i + 1]]`` and writes the tensors
    ``writes[writes_at[i]:writes_at[i + 1]]``. ``flow``: the ops that read and write each tensor. Sizes are in memory
    units of one or more bytes.

    By op: ``least``: how often every schedule must run the op at least: 1, or 0 if a schedule may do without it.
    ``once``: 1 if the op may run only once, else 0. ``cost``: in percent of the cost of running each op once.
    ``workspace``: its size. ``written``: the total size of the tensors that the op writes. ``before``, ``after``: if
    the first runs of some ops must keep their order, the previous and the next of these ops; -1 if there is none and
    for all other ops.

    ``size``: of each tensor. ``several``: whether any tensor can be written by several ops. ``plain``: whether the
    problem has no backward half; then chains of recomputation are limited, because they would grow without end.
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
    """The positions of each op's runs in the annealer's sequence. A run (one execution of an op) is a node with a
    number.

    By node: ``slot``: its position in the sequence, or -1 if it is not in the sequence; ``prev``, ``next``: the
    previous and the next run of the same op, or -1. By op: ``first``, ``last``: its first and its last run. These
    arrays are not in `State`, because passing fewer arrays makes calls of compiled functions faster.
    """

    slot: Ints
    prev: Ints
    next: Ints
    first: Ints
    last: Ints


class State(NamedTuple):
    """The sequence of runs that the annealer changes, with its memory at each position. In all arrays of numbers, -1
    means none.

    A run is one execution of an op. It is a node with a number, and each node is in a slot: a position, of which about
    half are empty.

    - By node: ``op``: the op that runs.
    - By slot: ``at``: the node in it. ``mem``: the bytes live. ``cap``: the bytes that may be live, `NO_CAP` if the
      slot is empty.
    - By op: ``runs``: the number of its runs. ``place``: its index in ``multi``. ``stamp``: 1 while the op is in
      ``chain``, else 0.
    - Lists: ``multi``: the ops that run more often than they must. ``free``: unused node numbers. ``log``: the edits
      that can still be undone. ``chain``, ``queue``: scratch space. ``best``: the ops of the cheapest sequence so
      far that fits the budget.
    - ``links``: the positions of each op's runs. ``number``: single integers, at the indices `FREE` to `BEST`.
      ``value``: single floats, at the indices `PENALTY` to `GROWTH`. ``random``: the state of the random number
      generator.
    """

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
    """Add ``bytes_`` (negative to subtract) to the live bytes ``mem`` of the slots ``low`` to ``high``, both included.
    Return the change of the penalty, which is the sum over all slots of the bytes by which ``mem`` exceeds ``cap``."""
    change = 0.0
    # Slices, so that indices start at 0: loops with possibly negative indices are not vectorised.
    live, most = mem[low : high + 1], cap[low : high + 1]
    for s in range(live.size):
        over = live[s] - most[s]
        live[s] += bytes_
        then = over + bytes_
        change += (then if then > 0.0 else 0.0) - (over if over > 0.0 else 0.0)
    return change


@vector_kernel
def price(mem: Floats, cap: Floats, low: int, high: int, bytes_: float) -> float:
    """Return by how much the penalty would change if ``bytes_`` were added to the live bytes ``mem`` of the slots
    ``low`` to ``high``, both included. The penalty is the sum over all slots of the bytes by which ``mem`` exceeds
    ``cap``. The arrays are not changed."""
    change = 0.0
    live, most = mem[low : high + 1], cap[low : high + 1]
    for s in range(live.size):
        over = live[s] - most[s]
        then = over + bytes_
        change += (then if then > 0.0 else 0.0) - (over if over > 0.0 else 0.0)
    return change


@vector_kernel
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
    """Return the latest run of ``op`` before the position ``slot`` in the annealer's sequence, as a node number; -1 if
    there is none. ``L``: the positions of all runs."""
    node = L.last[op]
    while node >= 0 and L.slot[node] >= slot:
        node = L.prev[node]
    return int(node)


@inner
def copy_before(F: Flow, L: Links, tensor: int, slot: int) -> int:
    """Return the run from which an op at the position ``slot`` would read ``tensor``: the latest earlier run of any op
    that writes the tensor. It is a node number, or -1 if there is none. ``F``: the ops that write each tensor. ``L``:
    the positions of all runs."""
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
    """Return the position (slot) at which ``tensor`` is written next after ``node``, a run that writes it; `NO_SLOT`,
    which is beyond all slots, if it is not written again. ``F``: the ops that write each tensor. ``L``: the positions
    of all runs."""
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
    """Return the position (slot) of the last read of ``tensor`` strictly between the slots ``start`` and ``stop``;
    ``start`` if there is none. The run ``skip`` (a node number, or -1) is ignored. ``F``: the ops that read each
    tensor. ``L``: the positions of all runs."""
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
    """Return the position (slot) until which ``tensor`` is live after ``node``, a run that writes it: that of the last
    read before the tensor is written again. It is the slot of ``node`` itself if nothing reads it. The run ``skip`` (a
    node number, or -1) is ignored."""
    return last_read(F, L, tensor, L.slot[node], copy_stop(F, L, tensor, node), skip)


@inner
def is_unread(P: Problem, S: State, node: int) -> bool:
    """Return whether no run reads any result of the run ``node`` before that result is written again. ``P``, ``S``: the
    annealer's problem and its sequence of runs."""
    op = S.op[node]
    for k in range(P.writes_at[op], P.writes_at[op + 1]):
        if end_of(P.flow, S.links, P.writes[k], node, -1) > S.links.slot[node]:
            return False
    return True


@inner
def node_after(at: Ints, slot: int) -> int:
    """Return the node (run) in the first non-empty slot (position) after ``slot``. There must be one. ``at``: for each
    slot, the node in it, or -1."""
    s = slot + 1
    while at[s] < 0:
        s += 1
    return int(at[s])
