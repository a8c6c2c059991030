"""The moves of the sequence annealer and its inner loop.

Source: FastSA (NeurIPS 2023) anneals the op sequence with single additions, removals and rotations; here an
addition brings a whole chain of recomputations, and deletes the runs that it leaves without readers, so that
recomputation can turn into delay.
"""

from __future__ import annotations

import math

import numpy as np

from rematplan.planner.kernel import kernel
from rematplan.planner.sequence_edits import commit, do_insert, do_remove, do_shift, undo
from rematplan.planner.sequence_state import (
    BEST,
    BEST_COST,
    COST,
    FREE,
    HALF,
    LOGGED,
    MULTI,
    OVERFLOW,
    PENALTY,
    PRICE,
    RUNS,
    Problem,
    Randoms,
    State,
    copy_before,
    copy_stop,
    end_of,
    free_kernel,
    is_unread,
    last_read,
    node_after,
    price,
    run_before,
)

CHAIN = 60  # most runs that one drop may insert
SEARCH = 16  # tries to find a candidate
ADAPT = 500  # most moves between two changes of the penalty's price
DROP_OVER, DROP_ANY, REMOVE, SHIFT = 0.35, 0.45, 0.70, 0.90  # cumulative shares; the rest removes, then drops

STEP = np.uint64(0x9E3779B97F4A7C15)
MIX_1 = np.uint64(0xBF58476D1CE4E5B9)
MIX_2 = np.uint64(0x94D049BB133111EB)
S27, S30, S31, S11 = np.uint64(27), np.uint64(30), np.uint64(31), np.uint64(11)


@kernel
def uniform(random: Randoms) -> float:
    """The next random number in [0, 1) (splitmix64)."""
    random[0] += STEP
    z = random[0]
    z = (z ^ (z >> S30)) * MIX_1
    z = (z ^ (z >> S27)) * MIX_2
    z = z ^ (z >> S31)
    return float(z >> S11) * 1.1102230246251565e-16


@kernel
def below(random: Randoms, n: int) -> int:
    """A random integer in 0..n-1."""
    return int(uniform(random) * n)


@kernel
def keeps_order(P: Problem, S: State, node: int) -> bool:
    """Whether the first runs stay in order when this run goes (its op's next run may become the first)."""
    op = S.op[node]
    if S.links.prev[node] >= 0 or P.after[op] < 0:
        return True
    return S.links.next[node] < 0 or bool(
        S.links.slot[S.links.next[node]] < S.links.slot[S.links.first[P.after[op]]]
    )


@kernel
def sweep(P: Problem, S: State, waiting: int) -> None:
    """Remove the first ``waiting`` queued nodes as far as nothing reads them, and what only they read, and so
    on."""
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


@kernel
def queue_servers(P: Problem, S: State, op: int, slot: int, waiting: int) -> int:
    """Queue the runs that served an op at a slot; returns the queue's length."""
    for k in range(P.reads_at[op], P.reads_at[op + 1]):
        if waiting < S.queue.size:
            S.queue[waiting] = copy_before(P.flow, S.links, P.reads[k], slot)
            waiting += 1
    return waiting


@kernel
def is_spare(P: Problem, S: State, node: int) -> bool:
    """Whether earlier copies can serve the reads that a run serves, and its op keeps the runs that it must."""
    op, slot = S.op[node], S.links.slot[node]
    if P.least[op] > 0:
        return bool(S.links.prev[node] >= 0)
    for k in range(P.writes_at[op], P.writes_at[op + 1]):
        t = P.writes[k]
        if copy_before(P.flow, S.links, t, slot) < 0 and end_of(P.flow, S.links, t, node, -1) > slot:
            return False
    return keeps_order(P, S, node)


@kernel
def remove_one(P: Problem, S: State) -> bool:
    """Remove a random repeated run; the run before it serves instead. Cascades to what only it read."""
    if S.number[MULTI] == 0:
        return False
    op = S.multi[below(S.random, S.number[MULTI])]
    node = S.links.last[op]
    for _ in range(below(S.random, S.runs[op] - P.least[op])):
        node = S.links.prev[node]
    if not is_spare(P, S, node):
        return False
    slot = S.links.slot[node]
    do_remove(P, S, node)
    sweep(P, S, queue_servers(P, S, op, slot, 0))
    return True


@kernel
def shift_one(P: Problem, S: State) -> bool:
    """Move a random run within its window: after what serves it, before what it serves, first runs in order."""
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


@kernel
def window(P: Problem, S: State, node: int) -> tuple[int, int]:
    """The slots strictly between which a run may move without changing who serves whom."""
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
        # The next copy may not be passed either: the read would move to it.
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
            # The run before serves readers between; passing them would change who serves them.
            if reader >= 0:
                low = max(low, S.links.slot[reader])
    return low, high


@kernel
def random_node(S: State, start: int) -> int:
    """A random node that stands at or beyond a slot."""
    return node_after(S.at, start - 1 + below(S.random, S.at.size - start))


@kernel
def choose_slot(S: State, over: bool) -> int:
    """A random slot; with ``over`` and a penalty, one whose cap is exceeded."""
    n = S.at.size
    slot = below(S.random, n)
    if over and S.value[PENALTY] > HALF:
        for _ in range(n):
            if S.mem[slot] > S.cap[slot]:
                return slot
            slot = slot + 1 if slot + 1 < n else 0
    return slot


@kernel
def candidate(P: Problem, S: State, slot: int) -> tuple[int, int, int]:
    """A random (reader, tensor, last use before it) where the tensor is idle across the slot; reader -1: none
    found."""
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
        end = last_read(P.flow, S.links, t, S.links.slot[server], place, -1)
        if end < slot:
            return reader, t, end
    return -1, -1, -1


@kernel
def drop_one(P: Problem, S: State, over: bool, allowed: float) -> bool:
    """Drop a tensor that is idle across a slot and recompute it, with what that needs, just before its next
    read.

    ``allowed``: the most energy that the move may add; a chain that cannot stay below it is given up early.
    """
    slot = choose_slot(S, over)
    if slot + 1 >= S.at.size:
        return False
    best, best_reader, best_op = -np.inf, -1, -1
    for _ in range(1 + below(S.random, 4)):
        reader, t, end = candidate(P, S, slot)
        if reader < 0:
            break
        op = a_maker(P, S, t)
        if is_spent(P, S, op):
            continue
        gain = (
            -S.value[PRICE] * price(S.mem, S.cap, end + 1, S.links.slot[reader] - 1, -P.size[t]) - P.cost[op]
        )
        if gain > best:
            best, best_reader, best_op = gain, reader, op
    if best_reader < 0:
        return False
    limit = allowed + S.value[PRICE] * S.value[PENALTY]
    length = collect(P, S, best_op, S.links.slot[best_reader], limit)
    if P.several:
        length = arrange(P, S, length)
    if length == 0 or not has_room(S, length):
        return False
    place_chain(P, S, best_reader, length)
    return True


@kernel
def has_room(S: State, length: int) -> bool:
    """Whether a chain of that length finds node numbers, slots and lines in the log."""
    if S.number[FREE] < length or S.number[RUNS] + length >= S.at.size - 1:
        return False
    return bool(S.number[LOGGED] + 3 * length + 8 <= S.log.shape[0])


@kernel
def collect(P: Problem, S: State, op: int, slot: int, limit: float) -> int:
    """The ops to run again before a slot, so that ``op`` can: into ``S.chain``, ascending; returns their
    number.

    For each read that is gone by then: run its producer again if holding it costs more, or by coin.
    0 if the chain costs more than ``limit`` or grows too long.
    """
    greedy = uniform(S.random) < 0.6
    S.chain[0] = op
    length, at, cost = 1, 0, 0.0
    S.stamp[op] = 1
    while at < length:
        member = S.chain[at]
        at += 1
        before = run_before(S.links, member, slot)
        if before < 0 or not ends_before(P, S, before, slot):
            cost += P.cost[member]
        if cost > limit:
            break
        for k in range(P.reads_at[member], P.reads_at[member + 1]):
            t = P.reads[k]
            if is_collected(P, S, t):
                continue
            producer = a_maker(P, S, t)
            server = copy_before(P.flow, S.links, t, slot)
            if server < 0:
                length, cost = insist(P, S, producer, length, cost)
                continue
            end = end_of(P.flow, S.links, t, server, -1)
            if end >= slot or is_spent(P, S, producer):
                continue
            if greedy:
                holding = S.value[PRICE] * price(S.mem, S.cap, end + 1, slot - 1, P.size[t])
                again = holding > P.cost[producer] * (0.3 + 2.7 * uniform(S.random))
            else:
                again = uniform(S.random) < 0.5
            if again and length < CHAIN:
                S.chain[length] = producer
                S.stamp[producer] = 1
                length += 1
    for k in range(length):
        S.stamp[S.chain[k]] = 0
    if cost > limit:
        return 0
    S.chain[:length].sort()
    return length


@kernel
def a_maker(P: Problem, S: State, tensor: int) -> int:
    """The op that makes a tensor; a random one of several."""
    if P.flow.producer[tensor] >= 0:
        return int(P.flow.producer[tensor])
    start = P.flow.makers_at[tensor]
    return int(P.flow.makers[start + below(S.random, P.flow.makers_at[tensor + 1] - start)])


@kernel
def is_collected(P: Problem, S: State, tensor: int) -> bool:
    """Whether an op of ``S.chain`` makes the tensor."""
    if P.flow.producer[tensor] >= 0:
        return bool(S.stamp[P.flow.producer[tensor]] == 1)
    for k in range(P.flow.makers_at[tensor], P.flow.makers_at[tensor + 1]):  # noqa: SIM110 - numba compiles no generators
        if S.stamp[P.flow.makers[k]] == 1:
            return True
    return False


@kernel
def is_spent(P: Problem, S: State, op: int) -> bool:
    """Whether an op runs already that may run only once."""
    return bool(P.once[op] > 0 and S.runs[op] > 0)


@kernel
def insist(P: Problem, S: State, op: int, length: int, cost: float) -> tuple[int, float]:
    """Add an op to ``S.chain`` that it cannot do without: nothing has made the tensor by then."""
    if length >= CHAIN or is_spent(P, S, op):
        return length, np.inf
    S.chain[length] = op
    S.stamp[op] = 1
    return length + 1, cost


@kernel
def arrange(P: Problem, S: State, length: int) -> int:
    """Put ``S.chain`` into an order in which each member stands behind those that make what it reads.

    Only inverses need it: all others stand in the base order. Returns the length, 0 if the members wait for
    each other in a circle.
    """
    for k in range(length):
        S.stamp[S.chain[k]] = 1
    placed = 0
    while placed < length:
        k = placed
        while k < length and waits(P, S, S.chain[k]):
            k += 1
        if k == length:
            break
        S.chain[placed], S.chain[k] = S.chain[k], S.chain[placed]
        S.stamp[S.chain[placed]] = 0
        placed += 1
    for k in range(placed, length):
        S.stamp[S.chain[k]] = 0
    return length if placed == length else 0


@kernel
def waits(P: Problem, S: State, op: int) -> bool:
    """Whether an op reads what a member of ``S.chain`` that is not placed yet makes."""
    for k in range(P.reads_at[op], P.reads_at[op + 1]):  # noqa: SIM110 - numba compiles no generators
        if is_collected(P, S, P.reads[k]):
            return True
    return False


@kernel
def ends_before(P: Problem, S: State, node: int, slot: int) -> bool:
    """Whether nothing reads the node's copies before a slot: running its op there again lets the node go."""
    op = S.op[node]
    for k in range(P.writes_at[op], P.writes_at[op + 1]):
        if last_read(P.flow, S.links, P.writes[k], S.links.slot[node], slot, -1) > S.links.slot[node]:
            return False
    return S.links.prev[node] >= 0 or keeps_order_at(P, S, op, slot)


@kernel
def keeps_order_at(P: Problem, S: State, op: int, slot: int) -> bool:
    """Whether an op's first run may stand at a slot, seen from the op that must come after it."""
    return bool(P.after[op] < 0 or slot <= S.links.slot[S.links.first[P.after[op]]])


@kernel
def place_chain(P: Problem, S: State, reader: int, length: int) -> None:
    """Run the ops of ``S.chain`` just before a node; earlier runs that nothing reads any more go."""
    for k in range(length):
        S.chain[k] = do_insert(P, S, S.chain[k], reader)
    for k in range(length - 1, -1, -1):
        node = S.chain[k]
        before = S.links.prev[node]
        if before >= 0:
            S.queue[0] = before
            sweep(P, S, 1)
        if P.several:
            sweep(P, S, queue_replaced(P, S, node))


@kernel
def queue_replaced(P: Problem, S: State, node: int) -> int:
    """Queue the runs whose copies end where the node writes new ones; returns their number."""
    op, waiting = S.op[node], 0
    if S.links.slot[node] < 0:  # swept itself
        return 0
    for k in range(P.writes_at[op], P.writes_at[op + 1]):
        before = copy_before(P.flow, S.links, P.writes[k], S.links.slot[node])
        if before >= 0 and waiting < S.queue.size:
            S.queue[waiting] = before
            waiting += 1
    return waiting


@kernel
def propose(P: Problem, S: State, allowed: float, orders_only: bool) -> bool:
    """Make one random move; False if it came to nothing (edits may be logged all the same)."""
    kind = uniform(S.random)
    if orders_only or REMOVE <= kind < SHIFT:
        return shift_one(P, S)
    if kind < DROP_ANY:
        return drop_one(P, S, kind < DROP_OVER, allowed)
    if kind < REMOVE:
        return remove_one(P, S)
    before = S.value[COST]
    if not remove_one(P, S):
        return False
    return drop_one(P, S, True, allowed + before - S.value[COST])


@kernel
def keep_best(S: State) -> None:
    """Copy the sequence as the best feasible one."""
    length = 0
    for s in range(S.at.size):
        if S.at[s] >= 0:
            S.best[length] = S.op[S.at[s]]
            length += 1
    S.number[BEST] = length
    S.value[BEST_COST] = S.value[COST]


@free_kernel
def anneal(P: Problem, S: State, moves: int, hot: float, cold: float, mode: int) -> int:
    """Make some moves while the temperature falls geometrically from ``hot`` to ``cold``.

    ``mode``: 0 all moves; 1 shifts only; 2 all moves, and return at the first feasible state. Returns the
    number of moves made.
    """
    feasible, temperature = 0, hot
    adapt = min(ADAPT, max(40, P.cost.size))
    ratio = (cold / hot) ** (1.0 / moves)
    for k in range(moves):
        temperature *= ratio
        allowed = -temperature * math.log(1.0 - uniform(S.random))
        was = S.value[COST] + S.value[PRICE] * S.value[PENALTY]
        done = propose(P, S, allowed, mode == 1)
        if done and S.value[COST] + S.value[PRICE] * S.value[PENALTY] - was <= allowed:
            commit(S)
        else:
            undo(P, S)
        if S.value[PENALTY] < HALF:
            feasible += 1
            if S.value[COST] < S.value[BEST_COST] - 1e-10:
                keep_best(S)
            if mode == 2:
                return k + 1
        if k % adapt == adapt - 1:
            if feasible < adapt // 10:
                S.value[PRICE] *= 1.15
            elif feasible > adapt // 2:
                S.value[PRICE] /= 1.08
            feasible = 0
            if S.number[FREE] < S.op.size // 8 or S.number[RUNS] > S.at.size * 3 // 4:
                S.number[OVERFLOW] = 1
                return k + 1
    return moves
