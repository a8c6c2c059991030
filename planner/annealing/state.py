"""The state of the annealer, and which run serves which read in it.

The sequence of runs, repeats included, is the whole plan. A read is served by the latest earlier run that writes
the tensor, and a copy lives from its run to its last read before the tensor is written again (`schedule.with_frees`
uses the same rule; no other choice of frees has a lower peak). A tensor's makers are the op and the inverses that
write it. Ops and inverses are treated alike here, and both are called ops. A virtual last op reads all outputs.

Runs are nodes with fixed numbers. Nodes are in slots, of which about half are empty, so that an insertion moves few
of them. ``mem[slot]`` is the bytes live there, exact for empty slots too. ``cap[slot]`` is what may be live there
(budget − workspace, or `NO_CAP` if the slot is empty). The penalty is Σ max(0, mem − cap). Sizes are float64 with
integer values below 2^53, so sums are exact and the loops vectorise.
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
    """Compile a function with numba for calls from other compiled functions, and allow sums to be reordered, since
    they are exact in any order.

    The function must not call itself: reloading it from the disk cache would crash.
    """
    return borrowing(function, fastmath=True, no_cpython_wrapper=True, no_cfunc_wrapper=True)


def free_kernel(function: F) -> F:
    """Compile a function with numba for calls from Python. Other Python threads can run during a call."""
    return borrowing(function, nogil=True)


class Flow(NamedTuple):
    """Which ops and inverses read and write each tensor, in compressed sparse rows:
    ``readers[readers_at[t]:readers_at[t + 1]]`` read tensor t, and ``makers[makers_at[t]:makers_at[t + 1]]`` write
    it.

    ``producer``: the only op or inverse that writes the tensor, or -1 if there are several.
    """

    readers_at: Ints
    readers: Ints
    makers_at: Ints
    makers: Ints
    producer: Ints


class Problem(NamedTuple):
    """The problem as arrays for the annealer. Inputs are left out. Ops are numbered: ops, inverses, and last a
    virtual end that reads all outputs.

    Op i reads the tensors ``reads[reads_at[i]:reads_at[i + 1]]`` and writes ``writes[writes_at[i]:writes_at[i +
    1]]``. ``flow``: readers and writers by tensor. ``least``: how often an op must run at least: 1, or 0 if others
    can write what it writes. ``once``: 1 for ops that may run only once. ``several``: whether any tensor has several
    writers. ``plain``: whether there is no backward half; chains of recomputation would grow without limit there.
    ``size``: of each tensor, in units of bytes. ``cost``: percent of the cost of running each op once.
    ``workspace``: of each op, in units of bytes. ``written``: the sum of the sizes that each op writes. ``before``,
    ``after``: an op's neighbours among the ops whose first runs keep their order, or -1.
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
    """Where each op's runs are in the sequence of runs.

    Each run is a node. By node: its ``slot`` (position), -1 if the node is not in the sequence, and the ``prev`` and
    ``next`` run of the same op. By op: its ``first`` and ``last`` run. A separate tuple from `State`, because calls
    with fewer arrays are faster.
    """

    slot: Ints
    prev: Ints
    next: Ints
    first: Ints
    last: Ints


class State(NamedTuple):
    """The annealer's sequence of runs and what is counted of it; -1 stands for no entry.

    A run is a node, and a node is in a slot (position); about half of the slots are empty. By node: its ``op``. By
    op: its number of ``runs``; its ``place`` in ``multi``, the list of ops that run more often than they must; a
    ``stamp``, 1 while the op is in ``chain``. By slot: the node ``at`` it; ``mem``, the bytes live there; ``cap``,
    the bytes that may be live there (`NO_CAP` if empty). ``links``: where each op's runs are. ``free``: unused node
    numbers. ``log``: edits since the last commit. ``chain``, ``queue``: scratch space. ``best``: the ops of the best
    sequence within the budget. ``number``: single numbers, indexed by `FREE` to `BEST`. ``value``: single numbers,
    indexed by `PENALTY` to `GROWTH`. ``random``: the state of the random generator.
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
    """Add ``bytes_``, perhaps a negative number, to ``mem`` in the slots ``low`` .. ``high``, and return the change
    of the penalty: of the bytes over ``cap``, summed over slots."""
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
    """Return the change of the penalty (the bytes over ``cap``, summed over slots) if ``bytes_`` were added in the
    slots ``low`` .. ``high``. Nothing is changed."""
    change = 0.0
    live, most = mem[low : high + 1], cap[low : high + 1]
    for s in range(live.size):
        over = live[s] - most[s]
        then = over + bytes_
        change += (then if then > 0.0 else 0.0) - (over if over > 0.0 else 0.0)
    return change


@vector_kernel
def first_over(mem: Floats, cap: Floats, start: int) -> int:
    """Return the first slot (position), from ``start`` on, where more bytes are live (``mem``) than may be
    (``cap``); -1 if there is none."""
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
    """Return the latest run (node) of an op before a slot (position), or -1 if there is none."""
    node = L.last[op]
    while node >= 0 and L.slot[node] >= slot:
        node = L.prev[node]
    return int(node)


@inner
def copy_before(F: Flow, L: Links, tensor: int, slot: int) -> int:
    """Return the run (node) that serves a read of the tensor at a slot (position): the latest earlier run that
    writes the tensor; -1 if there is none."""
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
    """Return the slot (position) of the next run after ``node`` that writes the tensor; `NO_SLOT`, beyond all slots,
    if there is none."""
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
    """Return the slot (position) of the last read of a tensor between the slots ``start`` and ``stop`` (both
    excluded), ignoring the run ``skip``; ``start`` if there is none."""
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
    """Return the slot (position) of the last read of what the run ``node`` writes of a tensor, before the tensor is
    written again, ignoring the run ``skip``; the slot of ``node`` if there is none."""
    return last_read(F, L, tensor, L.slot[node], copy_stop(F, L, tensor, node), skip)


@inner
def is_unread(P: Problem, S: State, node: int) -> bool:
    """Return whether nothing reads what the run ``node`` writes before it is overwritten."""
    op = S.op[node]
    for k in range(P.writes_at[op], P.writes_at[op + 1]):
        if end_of(P.flow, S.links, P.writes[k], node, -1) > S.links.slot[node]:
            return False
    return True


@inner
def node_after(at: Ints, slot: int) -> int:
    """Return the first run (node) in a slot (position) after ``slot``; there must be one. ``at``: the node in each
    slot, or -1."""
    s = slot + 1
    while at[s] < 0:
        s += 1
    return int(at[s])
