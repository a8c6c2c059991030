"""Chains of recomputation: the ops that must run again so that an op can run at a slot, inserted at once.

Intermediate sequences would cost more without saving memory yet.
"""

from __future__ import annotations

import numpy as np

from rematplan.planner.annealing.dead_runs import sweep
from rematplan.planner.annealing.edits import do_insert
from rematplan.planner.annealing.splitmix64 import below, uniform
from rematplan.planner.annealing.state import (
    FREE,
    LOGGED,
    NO_RUN,
    PRICE,
    RUNS,
    Problem,
    State,
    copy_before,
    end_of,
    last_read,
    price,
    run_before,
)
from rematplan.planner.caches.numba_kernels import inner
from rematplan.planner.core.array_types import Ints

CHAIN = 60  # the largest number of runs that one move may insert
LONGEST = 6.0  # logarithm to base 2 of the longest chain in problems without phases; most are shorter


@inner
def a_maker(P: Problem, S: State, tensor: int) -> int:
    """Return the op or inverse that writes ``tensor``; a random one if there are several."""
    if P.flow.producer[tensor] >= 0:
        return int(P.flow.producer[tensor])
    start = P.flow.makers_at[tensor]
    return int(P.flow.makers[start + below(S.random, P.flow.makers_at[tensor + 1] - start)])


@inner
def is_spent(P: Problem, S: State, op: int) -> bool:
    """Return whether ``op`` may run only once and already runs in the annealer's sequence of op executions (runs)."""
    return bool(P.once[op] > 0 and S.runs[op] > 0)


@inner
def has_room(S: State, length: int) -> bool:
    """Return whether the annealer's arrays have enough free node numbers, slots and log lines for inserting
    ``length`` op executions."""
    if S.number[FREE] < length or S.number[RUNS] + length >= S.at.size - 1:
        return False
    return bool(S.number[LOGGED] + 3 * length + 8 <= S.log.shape[0])


@inner
def a_length(S: State) -> int:
    """Return a random largest length for a chain of recomputations, usually a small one."""
    longest = LONGEST * uniform(S.random)
    return int(2.0 ** (longest * uniform(S.random)))


@inner
def collect(P: Problem, S: State, op: int, slot: int, limit: float) -> int:
    """Collect in ``S.chain``, ascending, the ops to run before ``slot`` so that ``op`` can run there, and return their
    number. Of the inputs that are not live, it chooses by price or at random which to recompute and which to hold.

    The number is 0, and ``S.chain`` has no meaning, if the ops cost more than ``limit``, or one that is needed cannot
    be added.
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
            end = end_of(P.flow, S.links, t, server, NO_RUN)
            if end >= slot or is_spent(P, S, producer):
                continue
            # A tensor that is not live is held longer or recomputed: by the price of its memory, or at
            # random.
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
    """Sort the first ``length`` items in place in ascending order, by insertion. There are few items, and numpy's
    sort would allocate memory."""
    for k in range(1, length):
        item, at = items[k], k
        while at > 0 and items[at - 1] > item:
            items[at] = items[at - 1]
            at -= 1
        items[at] = item


@inner
def early_place(P: Problem, S: State, op: int, slot: int, reader: int) -> int:
    """Return a run between ``slot`` and the run ``reader`` before which ``op`` can run again. It is the earliest that
    is the last to read an input of ``op``; ``reader`` if there is none."""
    until = S.links.slot[reader]
    first = until
    for k in range(P.reads_at[op], P.reads_at[op + 1]):
        t = P.reads[k]
        server = copy_before(P.flow, S.links, t, until)
        if server >= 0:
            end = end_of(P.flow, S.links, t, server, NO_RUN)
            if slot < end < first:
                first = end
    return int(S.at[first])


@inner
def supply(P: Problem, S: State, op: int, slot: int) -> float:
    """Return an estimate of the cost of providing the inputs of ``op`` at ``slot``: for each, the smaller cost of
    holding and of recomputing it. Inputs that are not written before count 0."""
    total = 0.0
    for k in range(P.reads_at[op], P.reads_at[op + 1]):
        t = P.reads[k]
        server = copy_before(P.flow, S.links, t, slot)
        if server < 0:
            continue
        end = end_of(P.flow, S.links, t, server, NO_RUN)
        if end < slot:
            holding = S.value[PRICE] * price(S.mem, S.cap, end + 1, slot - 1, P.size[t])
            total += min(holding, P.cost[a_maker(P, S, t)])
    return total


@inner
def is_collected(P: Problem, S: State, tensor: int) -> bool:
    """Return whether a marked op (``S.stamp``) of the chain writes ``tensor``."""
    if P.flow.producer[tensor] >= 0:
        return bool(S.stamp[P.flow.producer[tensor]] == 1)
    for k in range(P.flow.makers_at[tensor], P.flow.makers_at[tensor + 1]):  # noqa: SIM110 - numba compiles no generators
        if S.stamp[P.flow.makers[k]] == 1:
            return True
    return False


@inner
def insist(P: Problem, S: State, op: int, length: int, cost: float) -> tuple[int, float]:
    """Add ``op``, which the chain needs, to ``S.chain``. Return the chain's new length and its cost; the cost is
    infinite if the chain is full or ``op`` may not run again."""
    if length >= CHAIN or is_spent(P, S, op):
        return length, np.inf
    S.chain[length] = op
    S.stamp[op] = 1
    return length + 1, cost


@inner
def arrange(P: Problem, S: State, length: int) -> int:
    """Order the first ``length`` ops of ``S.chain`` in place, so that each op comes after those that write its reads.
    Return ``length``, or 0 for a cycle."""
    # Without inverses, ascending op numbers are a valid order.
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
    """Return whether ``op`` reads a tensor that is written by an op of the chain of recomputations ``S.chain`` that
    has no final position yet."""
    for k in range(P.reads_at[op], P.reads_at[op + 1]):  # noqa: SIM110 - numba compiles no generators
        if is_collected(P, S, P.reads[k]):
            return True
    return False


@inner
def ends_before(P: Problem, S: State, node: int, slot: int) -> bool:
    """Return whether the run ``node`` could be removed if its op ran again at ``slot``: nothing reads it
    earlier, and orders are kept.
    """
    op = S.op[node]
    for k in range(P.writes_at[op], P.writes_at[op + 1]):
        if last_read(P.flow, S.links, P.writes[k], S.links.slot[node], slot, NO_RUN) > S.links.slot[node]:
            return False
    return S.links.prev[node] >= 0 or keeps_order_at(P, S, op, slot)


@inner
def keeps_order_at(P: Problem, S: State, op: int, slot: int) -> bool:
    """Return whether the first run of ``op`` can be at ``slot``: before that of the next op in the required order."""
    return bool(P.after[op] < 0 or slot <= S.links.slot[S.links.first[P.after[op]]])


@inner
def place_chain(P: Problem, S: State, reader: int, length: int) -> None:
    """Insert runs of the first ``length`` ops of ``S.chain`` just before the run ``reader``, and remove the runs that
    they make useless. ``S.chain`` then has the nodes of the new runs."""
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
    """Fill ``S.queue`` with the latest earlier runs that write what ``node`` writes, and return their number; 0 if
    ``node`` is not in the sequence any more."""
    op, waiting = S.op[node], 0
    if S.links.slot[node] < 0:  # the run itself was removed
        return 0
    for k in range(P.writes_at[op], P.writes_at[op + 1]):
        before = copy_before(P.flow, S.links, P.writes[k], S.links.slot[node])
        if before >= 0 and waiting < S.queue.size:
            S.queue[waiting] = before
            waiting += 1
    return waiting
