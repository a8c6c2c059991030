"""The three edits of the annealer's sequence: insert, remove and move a run. Each run still has what it
reads.

`undo` reverts them from the last to the first; slots may differ then, but not the order.
"""

from __future__ import annotations

from rematplan.planner.annealing.state import (
    BUDGET,
    COST,
    FREE,
    INSERTED,
    LOGGED,
    MULTI,
    NO_CAP,
    NO_RUN,
    PENALTY,
    REMOVED,
    RUNS,
    SHIFTED,
    Problem,
    State,
    copy_before,
    end_of,
    last_read,
    node_after,
    run_before,
    spread,
)
from rematplan.planner.caches.numba_kernels import inner


@inner
def put(S: State, slot: int, source: int) -> None:
    """Copy the content of slot ``source`` to ``slot``, and record that the run is there."""
    node = S.at[source]
    S.at[slot] = node
    S.mem[slot] = S.mem[source]
    S.cap[slot] = S.cap[source]
    if node >= 0:
        S.links.slot[node] = slot


@inner
def make_room(P: Problem, S: State, node: int) -> int:
    """Return an empty slot just before the run ``node``, with its live bytes in ``S.mem``. If there is none, neighbours
    or ``node`` itself move; some slot must be empty."""
    right = S.links.slot[node]
    across = S.mem[right] - P.written[S.op[node]]  # bytes live both before and after the new slot
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
    S.at[slot] = NO_RUN
    S.mem[slot] = across
    S.cap[slot] = NO_CAP
    return int(slot)


@inner
def occupy(P: Problem, S: State, node: int, slot: int) -> None:
    """Put the run ``node`` into an empty slot whose live bytes are known, and add what is over the budget to
    the penalty.
    """
    S.at[slot] = node
    S.links.slot[node] = slot
    S.cap[slot] = S.value[BUDGET] - P.workspace[S.op[node]]
    over = S.mem[slot] - S.cap[slot]
    if over > 0.0:
        S.value[PENALTY] += over


@inner
def vacate(S: State, slot: int) -> None:
    """Make a slot empty, and subtract what is over the budget there from the penalty."""
    over = S.mem[slot] - S.cap[slot]
    if over > 0.0:
        S.value[PENALTY] -= over
    S.cap[slot] = NO_CAP
    S.at[slot] = NO_RUN


@inner
def link(P: Problem, S: State, node: int, op: int, before: int) -> None:
    """Insert the run ``node`` into the list of the runs of ``op`` after ``before``, first if that is `NO_RUN`. Update
    ``S.runs`` and ``S.multi``."""
    after = S.links.next[before] if before >= 0 else S.links.first[op]
    S.links.prev[node], S.links.next[node] = before, after
    if before >= 0:
        S.links.next[before] = node
    else:
        S.links.first[op] = node
    if after >= 0:
        S.links.prev[after] = node
    else:
        S.links.last[op] = node
    S.runs[op] += 1
    # It now runs more often than it must.
    if S.runs[op] == P.least[op] + 1:
        S.place[op] = S.number[MULTI]
        S.multi[S.number[MULTI]] = op
        S.number[MULTI] += 1


@inner
def unlink(P: Problem, S: State, node: int, op: int) -> None:
    """Remove the run ``node`` from the list of the runs of ``op``, and update ``S.runs`` and ``S.multi``."""
    before, after = S.links.prev[node], S.links.next[node]
    if before >= 0:
        S.links.next[before] = after
    else:
        S.links.first[op] = after
    if after >= 0:
        S.links.prev[after] = before
    else:
        S.links.last[op] = before
    if S.links.last[S.links.first.size + op] == node:
        S.links.last[S.links.first.size + op] = before
    S.runs[op] -= 1
    # It no longer runs more often than it must.
    if S.runs[op] == P.least[op]:
        S.number[MULTI] -= 1
        moved = S.multi[S.number[MULTI]]
        S.multi[S.place[op]] = moved
        S.place[moved] = S.place[op]


@inner
def insert(P: Problem, S: State, node: int, op: int, right: int) -> None:
    """Insert a run of ``op`` with number ``node`` just before the run ``right``. Later runs, up to the next one that
    writes the same tensor, read from it. Update live bytes, penalty, cost and the number of runs; log nothing."""
    slot = make_room(P, S, right)
    mem, cap, penalty = S.mem, S.cap, 0.0
    for k in range(P.reads_at[op], P.reads_at[op + 1]):
        t = P.reads[k]
        server = copy_before(P.flow, S.links, t, slot)
        end = end_of(P.flow, S.links, t, server, NO_RUN)
        if end < slot:
            penalty += spread(mem, cap, end + 1, slot, P.size[t])
    for k in range(P.writes_at[op], P.writes_at[op + 1]):
        t = P.writes[k]
        before = copy_before(P.flow, S.links, t, slot)
        if before >= 0 and end_of(P.flow, S.links, t, before, NO_RUN) > slot:
            end = last_read(P.flow, S.links, t, S.links.slot[before], slot, NO_RUN)
            penalty += spread(mem, cap, end + 1, slot - 1, -P.size[t])
        else:
            mem[slot] += P.size[t]
    S.value[PENALTY] += penalty
    S.value[COST] += P.cost[op]
    S.op[node] = op
    S.number[RUNS] += 1
    link(P, S, node, op, run_before(S.links, op, slot))
    occupy(P, S, node, slot)


@inner
def remove(P: Problem, S: State, node: int) -> None:
    """Remove the run ``node``. Runs that read a tensor from it then read it from the latest earlier run that writes the
    tensor, which must exist if there are such readers. Update live bytes, penalty, cost and the number of runs; log
    nothing."""
    op, slot = S.op[node], S.links.slot[node]
    mem, cap, penalty = S.mem, S.cap, 0.0
    vacate(S, slot)
    for k in range(P.writes_at[op], P.writes_at[op + 1]):
        t = P.writes[k]
        if end_of(P.flow, S.links, t, node, NO_RUN) > slot:
            end = end_of(P.flow, S.links, t, copy_before(P.flow, S.links, t, slot), NO_RUN)
            penalty += spread(mem, cap, end + 1, slot - 1, P.size[t])
        else:
            mem[slot] -= P.size[t]
    for k in range(P.reads_at[op], P.reads_at[op + 1]):
        t = P.reads[k]
        server = copy_before(P.flow, S.links, t, slot)
        end = end_of(P.flow, S.links, t, server, node)
        if end < slot:
            penalty += spread(mem, cap, end + 1, slot, -P.size[t])
    S.value[PENALTY] += penalty
    S.value[COST] -= P.cost[op]
    S.number[RUNS] -= 1
    unlink(P, S, node, op)
    S.links.slot[node] = -1


@inner
def shift(P: Problem, S: State, node: int, right: int) -> None:
    """Move the run ``node`` to just before the run ``right``. There, each run must still read from the same runs, and
    runs of one op keep their order (`window`). Update live bytes and penalty; log nothing."""
    new = make_room(P, S, right)
    op, old = S.op[node], S.links.slot[node]
    mem, cap, penalty = S.mem, S.cap, 0.0
    vacate(S, old)
    for k in range(P.writes_at[op], P.writes_at[op + 1]):
        t = P.writes[k]
        if end_of(P.flow, S.links, t, node, NO_RUN) == old:
            mem[old] -= P.size[t]
            mem[new] += P.size[t]
        elif new > old:
            penalty += spread(mem, cap, old, new - 1, -P.size[t])
        else:
            penalty += spread(mem, cap, new, old - 1, P.size[t])
    for k in range(P.reads_at[op], P.reads_at[op + 1]):
        t = P.reads[k]
        server = copy_before(P.flow, S.links, t, old)
        end = end_of(P.flow, S.links, t, server, node)
        was, now = max(end, old), max(end, new)
        if now > was:
            penalty += spread(mem, cap, was + 1, now, P.size[t])
        elif was > now:
            penalty += spread(mem, cap, now + 1, was, -P.size[t])
    S.value[PENALTY] += penalty
    occupy(P, S, node, new)


@inner
def do_insert(P: Problem, S: State, op: int, right: int) -> int:
    """Insert a run of ``op`` just before the run ``right``, log it for `undo`, and return its node."""
    S.number[FREE] -= 1
    node = S.free[S.number[FREE]]
    insert(P, S, node, op, right)
    note(S, INSERTED, node, right)
    return int(node)


@inner
def do_remove(P: Problem, S: State, node: int) -> None:
    """Remove the run ``node`` and log it for `undo`. Its number is free after `commit`."""
    slot = S.links.slot[node]
    remove(P, S, node)
    note(S, REMOVED, node, node_after(S.at, slot))


@inner
def do_shift(P: Problem, S: State, node: int, right: int) -> None:
    """Move the run ``node`` to just before the run ``right``, and log it for `undo`."""
    was = node_after(S.at, S.links.slot[node])
    shift(P, S, node, right)
    note(S, SHIFTED, node, was)


@inner
def note(S: State, kind: int, node: int, right: int) -> None:
    """Log an edit (`INSERTED`, `REMOVED` or `SHIFTED`) of the run ``node``, which `undo` puts before ``right``."""
    row = S.log[S.number[LOGGED]]
    row[0], row[1], row[2] = kind, node, right
    S.number[LOGGED] += 1


@inner
def undo(P: Problem, S: State) -> None:
    """Undo every edit of the annealer's sequence of op executions since the last `commit`, from the last to the
    first."""
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


@inner
def commit(S: State) -> None:
    """Make the logged edits final, and free the numbers of removed runs."""
    for k in range(S.number[LOGGED]):
        if S.log[k, 0] == REMOVED:
            S.free[S.number[FREE]] = S.log[k, 1]
            S.number[FREE] += 1
    S.number[LOGGED] = 0
