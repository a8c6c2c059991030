"""The random moves of simulated annealing on a sequence of runs; `anneal_loop` decides which are kept.

FastSA (NeurIPS 2023) adds, removes or rotates one run. Here one addition inserts a chain of recomputations
and removes runs that become useless.
"""

from __future__ import annotations

import numpy as np

from rematplan.planner.annealing.dead_runs import random_spare, take_out
from rematplan.planner.annealing.edits import do_shift
from rematplan.planner.annealing.plain_dag_moves import drop_with_siblings, remove_run
from rematplan.planner.annealing.recompute_chains import (
    a_maker,
    arrange,
    collect,
    early_place,
    has_room,
    is_spent,
    place_chain,
    supply,
)
from rematplan.planner.annealing.splitmix64 import below, uniform
from rematplan.planner.annealing.state import (
    COST,
    HALF,
    NO_RUN,
    PENALTY,
    PRICE,
    Problem,
    State,
    copy_before,
    copy_stop,
    first_over,
    last_read,
    node_after,
    price,
)
from rematplan.planner.caches.numba_kernels import inner

SEARCH = 16  # draws of a tensor that is live but unused, before a move fails
EARLY = 0.4
"""The share of the recomputations that are tried while their inputs are still live, instead of just before the next
read.

If the graph has skip connections, that can be cheaper. Moves of single runs cannot lead there from a position just
before the next read: at each position between the two, both the inputs and the output would be resident.
"""
DROP_OVER, DROP_ANY, REMOVE, SHIFT = 0.35, 0.45, 0.70, 0.90
PLAIN_OVER, PLAIN_ANY, PLAIN_REMOVE, PLAIN_SHIFT = 0.32, 0.40, 0.62, 0.82  # the same without phases


@inner
def remove_one(P: Problem, S: State) -> bool:
    """Remove a random run, and the runs whose results only it read. Return False, without a change, if the run drawn
    cannot be removed."""
    node = random_spare(P, S)
    if node < 0:
        return False
    take_out(P, S, node)
    return True


@inner
def shift_one(P: Problem, S: State) -> bool:
    """Move a random run such that each run still reads from the same runs. Return False, without a change, if the run
    drawn cannot be moved or would stay in its place."""
    node = random_node(S, 0)
    op, slot = S.op[node], S.links.slot[node]
    if op == P.cost.size - 1:
        return False
    low, high = window(P, S, node)
    if high - low <= 2:
        return False
    how = uniform(S.random)
    if how < 0.15:
        target = high - 1
    elif how < 0.3:
        target = low + 1
    elif how < 0.6:
        target = min(max(slot - 8 + below(S.random, 17), low + 1), high - 1)
    else:
        target = low + 1 + below(S.random, high - low - 1)
    right = node_after(S.at, target - 1) if target < slot else node_after(S.at, target)
    if right == node or right == node_after(S.at, slot):
        return False
    do_shift(P, S, node, right)
    return True


@inner
def window(P: Problem, S: State, node: int) -> tuple[int, int]:
    """Return two slots strictly between which the run ``node`` can be moved. There each run still reads from the same
    runs, and the required orders are kept."""
    op, slot = S.op[node], S.links.slot[node]
    low = S.links.slot[S.links.prev[node]] if S.links.prev[node] >= 0 else 0
    high = S.links.slot[S.links.next[node]] if S.links.next[node] >= 0 else S.at.size - 1
    if S.links.prev[node] < 0:
        if P.before[op] >= 0:
            low = max(low, S.links.slot[S.links.first[P.before[op]]])
        if P.after[op] >= 0:
            high = min(high, S.links.slot[S.links.first[P.after[op]]])
    for k in range(P.reads_at[op], P.reads_at[op + 1]):
        server = copy_before(P.flow, S.links, P.reads[k], slot)
        low = max(low, S.links.slot[server])
        # If the run passed the next run that writes the tensor, it would read from that one.
        high = min(high, copy_stop(P.flow, S.links, P.reads[k], server))
    for k in range(P.writes_at[op], P.writes_at[op + 1]):
        t = P.writes[k]
        if P.flow.producer[t] < 0:
            before = copy_before(P.flow, S.links, t, slot)
            low = max(low, S.links.slot[before] if before >= 0 else 0)
            high = min(high, copy_stop(P.flow, S.links, t, node))
        for j in range(P.flow.readers_at[t], P.flow.readers_at[t + 1]):
            reader = S.links.last[P.flow.readers[j]]
            while reader >= 0 and S.links.slot[reader] > slot:
                high = min(high, S.links.slot[reader])
                reader = S.links.prev[reader]
            # The reader before `node` reads from an earlier run. If `node` passed it, it would read from `node`.
            if reader >= 0:
                low = max(low, S.links.slot[reader])
    return low, high


@inner
def random_node(S: State, start: int) -> int:
    """Draw a random slot from ``start`` on. Return the run in it, or in the next slot that is not empty."""
    return node_after(S.at, start - 1 + below(S.random, S.at.size - start))


@inner
def choose_slot(S: State, over: bool) -> int:
    """Return a random slot; with ``over``, the next one from there that is over the budget, if there is any."""
    slot = below(S.random, S.at.size)
    if not over or S.value[PENALTY] <= HALF:
        return slot
    found = first_over(S.mem, S.cap, slot)
    return found if found >= 0 else max(0, first_over(S.mem, S.cap, 0))


@inner
def candidate(P: Problem, S: State, slot: int) -> tuple[int, int, int]:
    """Return a random tensor that is live but unused at ``slot``: (next reader, tensor, slot of its last use). Three
    times -1 if `SEARCH` draws find none."""
    for _ in range(SEARCH):
        reader = random_node(S, slot + 1)
        op, place = S.op[reader], S.links.slot[reader]
        reads = P.reads_at[op + 1] - P.reads_at[op]
        if reads == 0:
            continue
        t = P.reads[P.reads_at[op] + below(S.random, reads)]
        server = copy_before(P.flow, S.links, t, place)
        if S.links.slot[server] >= slot:
            continue
        end = last_read(P.flow, S.links, t, S.links.slot[server], place, NO_RUN)
        if end < slot:
            return reader, t, end
    return -1, -1, -1


@inner
def drop_one(P: Problem, S: State, over: bool, allowed: float) -> bool:
    """Free a tensor that is unused at a random slot, and recompute it, with what that needs, before its next read.
    Return False, without a change of the sequence, if no such tensor is found, the ops cost too much, or slots or nodes
    are short.

    ``allowed``: the largest increase of the energy, beyond which the move is given up. ``over``: prefer a slot over the
    budget.
    """
    slot = choose_slot(S, over)
    if slot + 1 >= S.at.size:
        return False
    best, best_at, best_op = -np.inf, -1, -1
    for _ in range(1 + below(S.random, 4)):
        reader, t, end = candidate(P, S, slot)
        if reader < 0:
            break
        op = a_maker(P, S, t)
        if is_spent(P, S, op):
            continue
        early = uniform(S.random) < EARLY
        place = early_place(P, S, op, slot, reader) if early else reader
        stop = S.links.slot[place]
        gain = -S.value[PRICE] * price(S.mem, S.cap, end + 1, stop - 1, -P.size[t]) - P.cost[op]
        if P.plain or early:
            gain -= supply(P, S, op, stop)
        if gain > best:
            best, best_at, best_op = gain, place, op
    if best_at < 0:
        return False
    limit = allowed + S.value[PRICE] * S.value[PENALTY]
    length = collect(P, S, best_op, S.links.slot[best_at], limit)
    if P.several:
        length = arrange(P, S, length)
    if length == 0 or not has_room(S, length):
        return False
    place_chain(P, S, best_at, length)
    return True


@inner
def propose(P: Problem, S: State, allowed: float, orders_only: bool) -> bool:
    """Make one random move. Return False if it failed; then the caller must undo the edits made.

    A move may be given up early if the energy would rise by more than ``allowed``. ``orders_only``: change the
    order alone.
    """
    kind = uniform(S.random)
    if orders_only:
        return shift_one(P, S)
    if P.plain and not P.several:
        return propose_plain(P, S, allowed, kind)
    if REMOVE <= kind < SHIFT:
        return shift_one(P, S)
    if kind < DROP_ANY:
        return drop_one(P, S, kind < DROP_OVER, allowed)
    if kind < REMOVE:
        return remove_one(P, S)
    before = S.value[COST]
    if not remove_one(P, S):
        return False
    return drop_one(P, S, True, allowed + before - S.value[COST])


@inner
def propose_plain(P: Problem, S: State, allowed: float, kind: float) -> bool:
    """Make one random move in a problem without phases, chosen by ``kind`` in [0, 1). Return False if it failed; then
    the caller must undo the edits made. A move may be given up early if the energy would rise by more than
    ``allowed``."""
    if PLAIN_REMOVE <= kind < PLAIN_SHIFT:
        return shift_one(P, S)
    if kind < PLAIN_ANY:
        return drop_with_siblings(P, S, choose_slot(S, kind < PLAIN_OVER), allowed)
    if kind < PLAIN_REMOVE:
        return remove_run(P, S, allowed)
    before = S.value[COST] + S.value[PRICE] * S.value[PENALTY]
    if not remove_one(P, S):
        return False
    gain = before - S.value[COST] - S.value[PRICE] * S.value[PENALTY]
    return drop_with_siblings(P, S, choose_slot(S, True), allowed + gain) or gain >= -allowed
