"""The state of the sequence annealer, and its three reversible edits: insert a run, remove a run, shift a
run.

The sequence of runs, repeats included, is the whole plan: a read is served by the latest run of its producer
before it, and a copy lives from its run to its last read before the producer's next run
(`schedule.with_frees` has the same rule, and no other choice of frees has a lower peak). A virtual last op
reads all outputs.

Runs are nodes with fixed numbers; nodes stand in slots, about half of which are empty, so that an insertion
moves few of them. ``mem[slot]`` is the bytes of the copies alive there, exact for empty slots too;
``cap[slot]`` is what may be alive there (budget − workspace, or `NO_CAP` where the slot is empty). The
penalty is Σ max(0, mem − cap). Sizes are float64 holding integers below 2^53, so sums are exact and the loops
vectorise.

Every edit leaves a valid sequence and is logged; `undo` replays the log backwards. Where nodes stand within
the gaps is no part of the logical state, so undo need not restore it.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple, TypeVar

import numpy as np
from numpy.typing import NDArray

from rematplan.planner.kernel import compiled, kernel

Ints = NDArray[np.int64]
Floats = NDArray[np.float64]

F = TypeVar("F", bound=Callable[..., object])

NO_CAP = 1e300
HALF = 0.5  # penalties are whole bytes; below this they are none

# Columns of `State.number`.
FREE, LOGGED, MULTI, RUNS, BEST, OVERFLOW = range(6)
# Columns of `State.value`.
PENALTY, COST, PRICE, BUDGET, BEST_COST = range(5)
# Kinds of log entries.
INSERTED, REMOVED, SHIFTED = range(3)


def vector_kernel(function: F) -> F:
    """As `kernel`, with sums that may be reordered (they are exact in any order).

    No kernel of the annealer may call itself: reloading such a one from the disk cache crashes.
    """
    return compiled(function, fastmath=True)


def free_kernel(function: F) -> F:
    """As `kernel`, and other Python threads run meanwhile."""
    return compiled(function, nogil=True)


class Problem(NamedTuple):
    """The problem as arrays. Tensors that are inputs are left out; op ``n - 1`` is the virtual end.

    ``x_at[i]:x_at[i + 1]`` are the places of row i in ``x``. ``cost`` is in percent of the base cost.
    ``before`` and ``after``: the neighbours of an op among those whose first runs must keep their order, or
    -1.
    """

    reads_at: Ints
    reads: Ints
    writes_at: Ints
    writes: Ints
    readers_at: Ints
    readers: Ints
    producer: Ints
    size: Floats
    cost: Floats
    workspace: Floats
    written: Floats
    before: Ints
    after: Ints


class State(NamedTuple):
    """The sequence. Indexed by node: ``op slot prev next`` (``prev`` and ``next`` run of the same op,
    ``slot`` -1 when not in the sequence); by op: ``first last runs place stamp``; by slot: ``at mem
    cap``."""

    op: Ints
    slot: Ints
    prev: Ints
    next: Ints
    first: Ints
    last: Ints
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
    random: NDArray[np.uint64]


@vector_kernel
def spread(mem: Floats, cap: Floats, low: int, high: int, bytes_: float) -> float:
    """Add bytes to the slots low..high; returns the change of the penalty."""
    change = 0.0
    for s in range(low, high + 1):
        over = mem[s] - cap[s]
        mem[s] += bytes_
        then = over + bytes_
        change += (then if then > 0.0 else 0.0) - (over if over > 0.0 else 0.0)
    return change


@vector_kernel
def price(mem: Floats, cap: Floats, low: int, high: int, bytes_: float) -> float:
    """What `spread` would return, without doing it."""
    change = 0.0
    for s in range(low, high + 1):
        over = mem[s] - cap[s]
        then = over + bytes_
        change += (then if then > 0.0 else 0.0) - (over if over > 0.0 else 0.0)
    return change


@kernel
def run_before(S: State, op: int, slot: int) -> int:
    """The latest run of an op that stands before a slot, or -1."""
    node = S.last[op]
    while node >= 0 and S.slot[node] >= slot:
        node = S.prev[node]
    return int(node)


@kernel
def last_read(P: Problem, S: State, tensor: int, start: int, stop: int, skip: int) -> int:
    """The slot of the last read of a tensor in (start, stop), the node ``skip`` apart; ``start`` if there is
    none."""
    latest = start
    for k in range(P.readers_at[tensor], P.readers_at[tensor + 1]):
        node = S.last[P.readers[k]]
        while node >= 0:
            s = S.slot[node]
            if s <= latest:
                break
            if s < stop and node != skip:
                latest = s
                break
            node = S.prev[node]
    return latest


@kernel
def end_of(P: Problem, S: State, tensor: int, node: int) -> int:
    """The slot at which the copy that ``node`` writes is last needed (its own slot if nothing reads it)."""
    later = S.next[node]
    return last_read(P, S, tensor, S.slot[node], S.slot[later] if later >= 0 else S.at.size, -1)


@kernel
def is_unread(P: Problem, S: State, node: int) -> bool:
    """Whether nothing reads any copy that the node writes."""
    op = S.op[node]
    for k in range(P.writes_at[op], P.writes_at[op + 1]):  # noqa: SIM110 - numba compiles no generators
        if end_of(P, S, P.writes[k], node) > S.slot[node]:
            return False
    return True


@kernel
def node_after(S: State, slot: int) -> int:
    """The first node that stands beyond a slot."""
    s = slot + 1
    while S.at[s] < 0:
        s += 1
    return int(S.at[s])


@kernel
def put(S: State, slot: int, source: int) -> None:
    """Move whatever a slot holds to another, physically."""
    node = S.at[source]
    S.at[slot] = node
    S.mem[slot] = S.mem[source]
    S.cap[slot] = S.cap[source]
    if node >= 0:
        S.slot[node] = slot


@kernel
def make_room(P: Problem, S: State, node: int) -> int:
    """An empty slot just before a node, its ``mem`` right; neighbours are pushed aside if need be."""
    right = S.slot[node]
    across = S.mem[right] - P.written[S.op[node]]  # what is alive on both sides of the gap
    if S.at[right - 1] < 0:
        slot = right - 1
        while slot > right - 4 and S.at[slot - 1] < 0:
            slot -= 1
        S.mem[slot] = across
        return int(slot)
    down, up = right - 1, right
    while True:
        if down > 0 and S.at[down] < 0:
            for s in range(down, right - 1):
                put(S, s, s + 1)
            slot = right - 1
            break
        if up < S.at.size and S.at[up] < 0:
            for s in range(up, right, -1):
                put(S, s, s - 1)
            slot = right
            break
        down -= 1
        up += 1
    S.at[slot] = -1
    S.mem[slot] = across
    S.cap[slot] = NO_CAP
    return int(slot)


@kernel
def occupy(P: Problem, S: State, node: int, slot: int) -> None:
    """Seat a node whose slot's ``mem`` is final; the slot now counts in the penalty."""
    S.at[slot] = node
    S.slot[node] = slot
    S.cap[slot] = S.value[BUDGET] - P.workspace[S.op[node]]
    over = S.mem[slot] - S.cap[slot]
    if over > 0.0:
        S.value[PENALTY] += over


@kernel
def vacate(S: State, slot: int) -> None:
    """Empty a slot; it counts in the penalty no more."""
    over = S.mem[slot] - S.cap[slot]
    if over > 0.0:
        S.value[PENALTY] -= over
    S.cap[slot] = NO_CAP
    S.at[slot] = -1


@kernel
def link(S: State, node: int, op: int, before: int) -> None:
    """Enter a run in its op's list, after the run ``before`` (-1: as the first)."""
    after = S.next[before] if before >= 0 else S.first[op]
    S.prev[node], S.next[node] = before, after
    if before >= 0:
        S.next[before] = node
    else:
        S.first[op] = node
    if after >= 0:
        S.prev[after] = node
    else:
        S.last[op] = node
    S.runs[op] += 1
    if S.runs[op] == 2:
        S.place[op] = S.number[MULTI]
        S.multi[S.number[MULTI]] = op
        S.number[MULTI] += 1


@kernel
def unlink(S: State, node: int, op: int) -> None:
    """Take a run out of its op's list."""
    before, after = S.prev[node], S.next[node]
    if before >= 0:
        S.next[before] = after
    else:
        S.first[op] = after
    if after >= 0:
        S.prev[after] = before
    else:
        S.last[op] = before
    S.runs[op] -= 1
    if S.runs[op] == 1:
        S.number[MULTI] -= 1
        moved = S.multi[S.number[MULTI]]
        S.multi[S.place[op]] = moved
        S.place[moved] = S.place[op]


@kernel
def insert(P: Problem, S: State, node: int, op: int, right: int) -> None:
    """Run an op just before the node ``right``: its reads are held until then, later reads of its writes move
    to it."""
    slot = make_room(P, S, right)
    mem, cap, penalty = S.mem, S.cap, 0.0
    for k in range(P.reads_at[op], P.reads_at[op + 1]):
        t = P.reads[k]
        server = run_before(S, P.producer[t], slot)
        later = S.next[server]
        end = last_read(P, S, t, S.slot[server], S.slot[later] if later >= 0 else S.at.size, -1)
        if end < slot:
            penalty += spread(mem, cap, end + 1, slot, P.size[t])
    before = run_before(S, op, slot)
    for k in range(P.writes_at[op], P.writes_at[op + 1]):
        t = P.writes[k]
        if before >= 0 and end_of(P, S, t, before) > slot:
            end = last_read(P, S, t, S.slot[before], slot, -1)
            penalty += spread(mem, cap, end + 1, slot - 1, -P.size[t])
        else:
            mem[slot] += P.size[t]
    S.value[PENALTY] += penalty
    S.value[COST] += P.cost[op]
    S.op[node] = op
    S.number[RUNS] += 1
    link(S, node, op, before)
    occupy(P, S, node, slot)


@kernel
def remove(P: Problem, S: State, node: int) -> None:
    """Undo of `insert`: the run before serves the reads (there must be one, unless nothing reads this run's
    copies)."""
    op, slot, before = S.op[node], S.slot[node], S.prev[node]
    mem, cap, penalty = S.mem, S.cap, 0.0
    vacate(S, slot)
    for k in range(P.writes_at[op], P.writes_at[op + 1]):
        t = P.writes[k]
        if end_of(P, S, t, node) > slot:
            end = end_of(P, S, t, before)
            penalty += spread(mem, cap, end + 1, slot - 1, P.size[t])
        else:
            mem[slot] -= P.size[t]
    for k in range(P.reads_at[op], P.reads_at[op + 1]):
        t = P.reads[k]
        server = run_before(S, P.producer[t], slot)
        later = S.next[server]
        end = last_read(P, S, t, S.slot[server], S.slot[later] if later >= 0 else S.at.size, node)
        if end < slot:
            penalty += spread(mem, cap, end + 1, slot, -P.size[t])
    S.value[PENALTY] += penalty
    S.value[COST] -= P.cost[op]
    S.number[RUNS] -= 1
    unlink(S, node, op)
    S.slot[node] = -1


@kernel
def shift(P: Problem, S: State, node: int, right: int) -> None:
    """Move a run to just before the node ``right``; no server and no served read may lie between."""
    new = make_room(P, S, right)
    op, old = S.op[node], S.slot[node]
    mem, cap, penalty = S.mem, S.cap, 0.0
    vacate(S, old)
    for k in range(P.writes_at[op], P.writes_at[op + 1]):
        t = P.writes[k]
        if end_of(P, S, t, node) == old:
            mem[old] -= P.size[t]
            mem[new] += P.size[t]
        elif new > old:
            penalty += spread(mem, cap, old, new - 1, -P.size[t])
        else:
            penalty += spread(mem, cap, new, old - 1, P.size[t])
    for k in range(P.reads_at[op], P.reads_at[op + 1]):
        t = P.reads[k]
        server = run_before(S, P.producer[t], old)
        later = S.next[server]
        end = last_read(P, S, t, S.slot[server], S.slot[later] if later >= 0 else S.at.size, node)
        was, now = max(end, old), max(end, new)
        if now > was:
            penalty += spread(mem, cap, was + 1, now, P.size[t])
        elif was > now:
            penalty += spread(mem, cap, now + 1, was, -P.size[t])
    S.value[PENALTY] += penalty
    occupy(P, S, node, new)


@kernel
def do_insert(P: Problem, S: State, op: int, right: int) -> int:
    """`insert`, logged; returns the node."""
    S.number[FREE] -= 1
    node = S.free[S.number[FREE]]
    insert(P, S, node, op, right)
    note(S, INSERTED, node, right)
    return int(node)


@kernel
def do_remove(P: Problem, S: State, node: int) -> None:
    """`remove`, logged. The node's number stays taken until `commit`."""
    slot = S.slot[node]
    remove(P, S, node)
    note(S, REMOVED, node, node_after(S, slot))


@kernel
def do_shift(P: Problem, S: State, node: int, right: int) -> None:
    """`shift`, logged."""
    was = node_after(S, S.slot[node])
    shift(P, S, node, right)
    note(S, SHIFTED, node, was)


@kernel
def note(S: State, kind: int, node: int, right: int) -> None:
    """Write one log entry."""
    row = S.log[S.number[LOGGED]]
    row[0], row[1], row[2] = kind, node, right
    S.number[LOGGED] += 1


@kernel
def undo(P: Problem, S: State) -> None:
    """Take back every edit since the last commit."""
    for k in range(S.number[LOGGED] - 1, -1, -1):
        kind, node, right = S.log[k, 0], S.log[k, 1], S.log[k, 2]
        if kind == INSERTED:
            remove(P, S, node)
            S.free[S.number[FREE]] = node
            S.number[FREE] += 1
        elif kind == REMOVED:
            insert(P, S, node, S.op[node], right)
        else:
            shift(P, S, node, right)
    S.number[LOGGED] = 0


@kernel
def commit(S: State) -> None:
    """Keep the edits since the last commit; the numbers of removed nodes become free."""
    for k in range(S.number[LOGGED]):
        if S.log[k, 0] == REMOVED:
            S.free[S.number[FREE]] = S.log[k, 1]
            S.number[FREE] += 1
    S.number[LOGGED] = 0
