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
    """Compile a function for calls from other kernels, and allow sums to be reordered, since they are exact in any
    order.

    No kernel of the annealer may call itself: reloading such a kernel from the disk cache crashes.
    """
    return borrowing(function, fastmath=True, no_cpython_wrapper=True, no_cfunc_wrapper=True)


def free_kernel(function: F) -> F:
    """Compile a function that Python calls. Other Python threads can run during a call."""
    return borrowing(function, nogil=True)


class Flow(NamedTuple):
    """Which ops read and write each tensor, by tensor: see `Problem` for the format.

    ``producer``: the only op or inverse that writes the tensor, or -1 if there are several.
    """

    readers_at: Ints
    readers: Ints
    makers_at: Ints
    makers: Ints
    producer: Ints


class Problem(NamedTuple):
    """The problem as arrays. Inputs are left out; op ``n - 1`` is the virtual end.

    ``x_at[i]:x_at[i + 1]`` is the range of row i in ``x``. ``cost``: percent of the base cost. ``plain``: whether
    there is no backward half; chains of recomputation would grow without limit there. ``several``: whether any
    tensor has several makers. ``least``: the number of runs that an op must keep: 1, or 0 if others can write what
    it writes. ``once``: 1 for ops that may run only once. ``before`` and ``after``: an op's neighbours among the
    ops whose first runs keep their order, or -1.
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
    """The positions of each op's runs.

    By node: its ``slot``, -1 if it is not in the sequence, and the ``prev`` and ``next`` run of the same op. By op:
    its ``first`` and ``last`` run. It is separate from the rest of the state because calls with fewer arrays are
    faster.
    """

    slot: Ints
    prev: Ints
    next: Ints
    first: Ints
    last: Ints


class State(NamedTuple):
    """The sequence of runs and what is counted of it; entries that do not exist are -1.

    By node: its ``op``. By op: its number of ``runs``; its ``place`` in ``multi``, the list of ops that run more often
    than they must; a ``stamp``, 1 while the op is in ``chain``. By slot: the node ``at`` it, ``mem`` and ``cap``.
    ``free``: unused node numbers. ``log``: edits since the last commit. ``chain`` and ``queue``: scratch space.
    ``best``: the ops of the best sequence within the budget. ``number`` and ``value``: single numbers. ``random``: the
    state of the generator.
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
    """Add bytes, perhaps a negative number, to ``mem`` in the slots low..high. Returns the change of the penalty."""
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
    """Return the change of the penalty if bytes were added in the slots low..high. Nothing is changed."""
    change = 0.0
    live, most = mem[low : high + 1], cap[low : high + 1]
    for s in range(live.size):
        over = live[s] - most[s]
        then = over + bytes_
        change += (then if then > 0.0 else 0.0) - (over if over > 0.0 else 0.0)
    return change


@vector_kernel
def first_over(mem: Floats, cap: Floats, start: int) -> int:
    """Return the first slot, from ``start`` on, whose cap is exceeded, or -1."""
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
    """Return the node of the latest run of an op before a slot, or -1 if there is none."""
    node = L.last[op]
    while node >= 0 and L.slot[node] >= slot:
        node = L.prev[node]
    return int(node)


@inner
def copy_before(F: Flow, L: Links, tensor: int, slot: int) -> int:
    """Return the run that serves a read of the tensor at a slot: the latest earlier run that writes it, or -1."""
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
    """Return the slot of the next run after ``node`` that writes the tensor; beyond all slots if there is none."""
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
    """Return the slot of the last read of a tensor in (start, stop), ignoring the node ``skip``; ``start`` if there
    is none."""
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
    """Return the slot of the last read of the copy that ``node`` writes, ignoring the node ``skip``; its own slot
    if there is none."""
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
    """Return the first node in a slot after ``slot``; there must be one."""
    s = slot + 1
    while at[s] < 0:
        s += 1
    return int(at[s])
