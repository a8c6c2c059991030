"""Chains of recomputation: what must run again before a slot so that an op can run there, and where it is inserted.

FastSA (NeurIPS 2023) adds single runs. Inserting a whole chain avoids the intermediate states, which cost more
without gaining anything.
"""

from __future__ import annotations

import numpy as np

from rematplan.planner.annealing.dead_runs import sweep
from rematplan.planner.annealing.edits import do_insert
from rematplan.planner.annealing.splitmix64 import below, uniform
from rematplan.planner.annealing.state import (
    FREE,
    LOGGED,
    PRICE,
    RUNS,
    Ints,
    Problem,
    State,
    copy_before,
    end_of,
    last_read,
    price,
    run_before,
)
from rematplan.planner.caches.numba_kernels import inner

CHAIN = 60  # most runs that one drop may insert
LONGEST = 6.0  # logarithm to base 2 of the longest chain that is chosen; most are short


@inner
def a_maker(P: Problem, S: State, tensor: int) -> int:
    """Return an op or inverse that writes a tensor; if several do, a random one of these."""
    if P.flow.producer[tensor] >= 0:
        return int(P.flow.producer[tensor])
    start = P.flow.makers_at[tensor]
    return int(P.flow.makers[start + below(S.random, P.flow.makers_at[tensor + 1] - start)])


@inner
def is_spent(P: Problem, S: State, op: int) -> bool:
    """Return whether an op may run only once and already runs in the sequence."""
    return bool(P.once[op] > 0 and S.runs[op] > 0)


@inner
def has_room(S: State, length: int) -> bool:
    """Return whether there are enough node numbers, slots and lines of the log for inserting ``length`` runs."""
    if S.number[FREE] < length or S.number[RUNS] + length >= S.at.size - 1:
        return False
    return bool(S.number[LOGGED] + 3 * length + 8 <= S.log.shape[0])


@inner
def a_length(S: State) -> int:
    """Return a random length for a chain of recomputations, usually a short one."""
    longest = LONGEST * uniform(S.random)
    return int(2.0 ** (longest * uniform(S.random)))


@inner
def collect(P: Problem, S: State, op: int, slot: int, limit: float) -> int:
    """Collect in ``S.chain`` the ops that are to run just before a slot so that ``op`` can run there, and ``op``
    itself, ascending. Return their number; 0 if they cost more than ``limit`` or an op that is needed cannot be
    added.

    For each read of a collected op: if no run has written the tensor before the slot, an op that writes it is
    collected. If one has, but the tensor is not resident until the slot, either it will stay resident longer, or an
    op that writes it is collected, as far as the chain is short enough and the op may run again. Each call of the
    function decides this either by the price of the memory, with a random factor, or by coin.
    """
    greedy = uniform(S.random) < 0.6
    most = a_length(S) if P.plain else CHAIN
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
        reads = P.reads_at[member + 1] - P.reads_at[member]
        coin = 1.0 / reads if P.plain and reads > 2 else 0.5
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
                again = uniform(S.random) < coin
            if again and length < most:
                S.chain[length] = producer
                S.stamp[producer] = 1
                length += 1
    for k in range(length):
        S.stamp[S.chain[k]] = 0
    if cost > limit:
        return 0
    sort(S.chain, length)
    return length


@inner
def sort(items: Ints, length: int) -> None:
    """Sort the first ``length`` items in place, ascending, by insertion: there are few, and numpy's sort allocates
    memory."""
    for k in range(1, length):
        item, at = items[k], k
        while at > 0 and items[at - 1] > item:
            items[at] = items[at - 1]
            at -= 1
        items[at] = item


@inner
def early_place(P: Problem, S: State, op: int, slot: int, reader: int) -> int:
    """Return the run in front of which an op can run again without its inputs staying resident longer: the first one
    behind ``slot`` that is the last reader of one of the inputs, or ``reader`` if there is none before it."""
    until = S.links.slot[reader]
    first = until
    for k in range(P.reads_at[op], P.reads_at[op + 1]):
        t = P.reads[k]
        server = copy_before(P.flow, S.links, t, until)
        if server >= 0:
            end = end_of(P.flow, S.links, t, server, -1)
            if slot < end < first:
                first = end
    return int(S.at[first])


@inner
def supply(P: Problem, S: State, op: int, slot: int) -> float:
    """Return an estimate of the cost of having an op's inputs resident at a slot: each stays resident until then or
    is computed again, whichever is cheaper. Inputs that no earlier run writes count as 0."""
    total = 0.0
    for k in range(P.reads_at[op], P.reads_at[op + 1]):
        t = P.reads[k]
        server = copy_before(P.flow, S.links, t, slot)
        if server < 0:
            continue
        end = end_of(P.flow, S.links, t, server, -1)
        if end < slot:
            holding = S.value[PRICE] * price(S.mem, S.cap, end + 1, slot - 1, P.size[t])
            total += min(holding, P.cost[a_maker(P, S, t)])
    return total


@inner
def is_collected(P: Problem, S: State, tensor: int) -> bool:
    """Return whether the tensor is written by an op that is in ``S.chain`` and marked there (`arrange` removes the
    marks)."""
    if P.flow.producer[tensor] >= 0:
        return bool(S.stamp[P.flow.producer[tensor]] == 1)
    for k in range(P.flow.makers_at[tensor], P.flow.makers_at[tensor + 1]):  # noqa: SIM110 - numba compiles no generators
        if S.stamp[P.flow.makers[k]] == 1:
            return True
    return False


@inner
def insist(P: Problem, S: State, op: int, length: int, cost: float) -> tuple[int, float]:
    """Add to ``S.chain`` an op whose tensor no run has written before the slot, so that the chain cannot do without
    the op.

    Return the chain's new length and its cost; an infinite cost if the chain is full or the op may not run again.
    """
    if length >= CHAIN or is_spent(P, S, op):
        return length, np.inf
    S.chain[length] = op
    S.stamp[op] = 1
    return length + 1, cost


@inner
def arrange(P: Problem, S: State, length: int) -> int:
    """Order ``S.chain`` so that each op comes after the ops that write its reads. Return its length, or 0 if there
    is a cycle.

    Only inverses make this necessary; all other ops are in the problem's order.
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


@inner
def waits(P: Problem, S: State, op: int) -> bool:
    """Return whether an op reads a tensor that is written by an op of ``S.chain`` that is not placed yet."""
    for k in range(P.reads_at[op], P.reads_at[op + 1]):  # noqa: SIM110 - numba compiles no generators
        if is_collected(P, S, P.reads[k]):
            return True
    return False


@inner
def ends_before(P: Problem, S: State, node: int, slot: int) -> bool:
    """Return whether a run can be removed if its op runs again at ``slot``: nothing reads what the run writes before
    that slot, and the order of first runs is kept."""
    op = S.op[node]
    for k in range(P.writes_at[op], P.writes_at[op + 1]):
        if last_read(P.flow, S.links, P.writes[k], S.links.slot[node], slot, -1) > S.links.slot[node]:
            return False
    return S.links.prev[node] >= 0 or keeps_order_at(P, S, op, slot)


@inner
def keeps_order_at(P: Problem, S: State, op: int, slot: int) -> bool:
    """Return whether an op's first run may be at a slot (position), if first runs must keep an order."""
    return bool(P.after[op] < 0 or slot <= S.links.slot[S.links.first[P.after[op]]])


@inner
def place_chain(P: Problem, S: State, reader: int, length: int) -> None:
    """Run the ops of ``S.chain`` just in front of the node ``reader``, and remove earlier runs that nothing reads
    any more."""
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


@inner
def queue_replaced(P: Problem, S: State, node: int) -> int:
    """Fill ``S.queue`` with the earlier runs whose results the run ``node`` overwrites. Return their number; 0 if
    ``node`` was removed."""
    op, waiting = S.op[node], 0
    if S.links.slot[node] < 0:  # swept itself
        return 0
    for k in range(P.writes_at[op], P.writes_at[op + 1]):
        before = copy_before(P.flow, S.links, P.writes[k], S.links.slot[node])
        if before >= 0 and waiting < S.queue.size:
            S.queue[waiting] = before
            waiting += 1
    return waiting
