"""Which runs (op executions) may be removed from the annealer's sequence, and the removal of runs that nothing
reads."""

from __future__ import annotations

from rematplan.planner.annealing.edits import commit, do_remove, undo
from rematplan.planner.annealing.splitmix64 import below
from rematplan.planner.annealing.state import (
    HALF,
    LOGGED,
    MULTI,
    NO_RUN,
    PENALTY,
    Problem,
    State,
    copy_before,
    end_of,
    is_unread,
)
from rematplan.planner.caches.numba_kernels import inner, kernel
from rematplan.planner.core.array_types import Ints


@inner
def keeps_order(P: Problem, S: State, node: int) -> bool:
    """Return whether the removal of the run ``node`` keeps the order that first runs must have."""
    op = S.op[node]
    if S.links.prev[node] >= 0 or P.after[op] < 0:
        return True
    # The op's next run becomes its first, and must precede the first run of the next op.
    return S.links.next[node] < 0 or bool(
        S.links.slot[S.links.next[node]] < S.links.slot[S.links.first[P.after[op]]]
    )


@inner
def is_spare(P: Problem, S: State, node: int) -> bool:
    """Return whether the run ``node`` can be removed: others still have what they read, and the required order is kept.
    The first run of an op that must run never can."""
    op, slot = S.op[node], S.links.slot[node]
    if P.least[op] > 0:
        return bool(S.links.prev[node] >= 0)
    for k in range(P.writes_at[op], P.writes_at[op + 1]):
        t = P.writes[k]
        if copy_before(P.flow, S.links, t, slot) < 0 and end_of(P.flow, S.links, t, node, NO_RUN) > slot:
            return False
    return keeps_order(P, S, node)


@inner
def sweep(P: Problem, S: State, waiting: int) -> None:
    """Remove runs whose results nothing reads: of the first ``waiting`` entries of ``S.queue``, then of the runs from
    which removed ones read.

    Runs that must stay are kept, and once the log is full, all others too.
    """
    while waiting > 0:
        waiting -= 1
        node = S.queue[waiting]
        slot = S.links.slot[node]
        if slot < 0 or S.number[LOGGED] >= S.log.shape[0]:
            continue
        op = S.op[node]
        if S.runs[op] <= P.least[op] or not is_unread(P, S, node) or not keeps_order(P, S, node):
            continue
        do_remove(P, S, node)
        waiting = queue_servers(P, S, op, slot, waiting)


@inner
def queue_servers(P: Problem, S: State, op: int, slot: int, waiting: int) -> int:
    """Append to the first ``waiting`` entries of ``S.queue`` the runs from which ``op`` would read at ``slot``, as far
    as they fit. Return the new number of entries."""
    for k in range(P.reads_at[op], P.reads_at[op + 1]):
        if waiting < S.queue.size:
            S.queue[waiting] = copy_before(P.flow, S.links, P.reads[k], slot)
            waiting += 1
    return waiting


@inner
def random_spare(P: Problem, S: State) -> int:
    """Draw a random run of an op that runs more often than it must. Return it if it can be removed; -1 if it cannot, or
    no op runs more often."""
    if S.number[MULTI] == 0:
        return -1
    op = S.multi[below(S.random, S.number[MULTI])]
    node = S.links.last[op]
    for _ in range(below(S.random, S.runs[op] - P.least[op])):
        node = S.links.prev[node]
    return node if is_spare(P, S, node) else -1


@inner
def take_out(P: Problem, S: State, node: int) -> None:
    """Remove the run ``node`` from the annealer's sequence of op executions (runs), then the runs whose results only
    it read."""
    op, slot = S.op[node], S.links.slot[node]
    do_remove(P, S, node)
    sweep(P, S, queue_servers(P, S, op, slot, 0))


@kernel
def tidy(P: Problem, S: State, order: Ints) -> None:
    """Remove runs, with the runs whose results only they read, as long as the sequence stays valid and within the
    budget. Ops are tried in ``order`` until nothing changes. A sequence over the budget is not changed."""
    if S.value[PENALTY] >= HALF:
        return
    removed = True
    while removed:
        removed = False
        for op in order:
            node = S.links.last[op]
            while node >= 0:
                if not is_spare(P, S, node):
                    node = S.links.prev[node]
                    continue
                slot, before = S.links.slot[node], S.links.prev[node]
                do_remove(P, S, node)
                sweep(P, S, queue_servers(P, S, op, slot, 0))
                if S.value[PENALTY] < HALF:
                    commit(S)
                    removed = True
                    # Not from the last run again: a schedule of 10^5 runs would then take minutes.
                    gone = before >= 0 and S.links.slot[before] < 0
                    node = S.links.last[op] if gone else before
                else:
                    undo(P, S)
                    node = before
