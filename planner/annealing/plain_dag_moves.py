"""The annealer's moves for problems without phases, where ops read many tensors and tensors have many readers.

There a tensor can be dropped cheaply only while its op's inputs are resident. So drops help or hinder each other
like the members of an independent set: an input that is held for one drop also serves its other readers, and cannot
be dropped itself. Therefore a drop is combined with the other drops that the held inputs allow (`drop_siblings`),
and with undoing drops that it makes unnecessary (`hold_inputs`). The move is accepted or rejected as a whole.

Source: the pair of moves is that of local search for independent sets (Andrade, Resende, Werneck 2012: insert a
vertex, remove those that conflict, insert those that have become free).
"""

from __future__ import annotations

import numpy as np

from rematplan.planner.annealing.dead_runs import is_spare, random_spare, sweep, take_out
from rematplan.planner.annealing.edits import do_insert
from rematplan.planner.annealing.recompute_chains import (
    collect,
    early_place,
    has_room,
    is_spent,
    keeps_order_at,
    place_chain,
    supply,
)
from rematplan.planner.annealing.splitmix64 import below, uniform
from rematplan.planner.annealing.state import (
    LOGGED,
    NO_SLOT,
    PENALTY,
    PRICE,
    Problem,
    State,
    copy_before,
    end_of,
    last_read,
    price,
)
from rematplan.planner.caches.numba_kernels import inner

TRIES = 24  # to find a tensor that is idle across a slot
EARLY = 0.5  # share of the drops that run again while their inputs are there
TENSORS_DRAWN = 2  # tensors drawn of which the best is dropped
TOGETHER = 0.5  # share of the drops that bring siblings along, and of those that hold inputs again
ROOM = 64  # lines of the log that are kept free


@inner
def idle_tensor(P: Problem, S: State, slot: int) -> tuple[int, int, int]:
    """Return a random tensor that is resident but unused across a slot: (next reader, tensor, slot of its last use
    before); (-1, -1, -1) if no draw finds one."""
    for _ in range(TRIES):
        t = below(S.random, P.size.size)
        server = copy_before(P.flow, S.links, t, slot)
        if server < 0:
            continue
        end, first = uses_around(P, S, t, server, slot)
        if first < NO_SLOT:
            return int(S.at[first]), t, end
    return -1, -1, -1


@inner
def uses_around(P: Problem, S: State, tensor: int, server: int, slot: int) -> tuple[int, int]:
    """Return the slots of the last use before ``slot``, and of the first use behind it, of the tensor as the run
    ``server`` wrote it.

    The first is the slot of ``server`` if nothing reads the tensor in between. The second is `NO_SLOT` if the tensor
    is used at ``slot`` itself, or never behind it.
    """
    links, end, first = S.links, S.links.slot[server], NO_SLOT
    later = links.next[server]
    stop = links.slot[later] if later >= 0 else NO_SLOT
    for k in range(P.flow.readers_at[tensor], P.flow.readers_at[tensor + 1]):
        node = links.last[P.flow.readers[k]]
        while node >= 0 and links.slot[node] > end:
            place = links.slot[node]
            if place == slot:
                return end, NO_SLOT
            if place < slot:
                end = place
            elif place < first and place <= stop:
                first = place
            node = links.prev[node]
    return end, first


@inner
def relief(P: Problem, S: State, op: int, slot: int, stop: int) -> tuple[float, int]:
    """Return a lower estimate of the energy saved if an op runs again just before the slot ``stop``, and the earlier
    run whose results can then be freed early; -1 for none.

    Both are (0.0, -1) if, of one of the op's tensors, the last run before ``stop`` that writes it is not before
    ``slot``. Only tensors of the op that are unused across ``slot`` and read later count. The op's cost is
    subtracted, unless the earlier run can then be removed; the cost of having its inputs resident is not.
    """
    saved, server, unread = 0.0, -1, True
    for k in range(P.writes_at[op], P.writes_at[op + 1]):
        t = P.writes[k]
        before = copy_before(P.flow, S.links, t, stop)
        if before < 0 or S.links.slot[before] >= slot:
            return 0.0, -1
        end = last_read(P.flow, S.links, t, S.links.slot[before], stop, -1)
        unread = unread and end == S.links.slot[before]
        if end < slot and end_of(P.flow, S.links, t, before, -1) >= stop:
            saved -= S.value[PRICE] * price(S.mem, S.cap, end + 1, stop - 1, -P.size[t])
            server = before
    if not unread or server < 0 or (S.links.prev[server] < 0 and not keeps_order_at(P, S, op, stop)):
        saved -= P.cost[op]
    return saved, server


@inner
def drop_siblings(P: Problem, S: State, op: int, node: int, slot: int) -> None:
    """Run further ops again in front of a node: those that share a read with ``op``, where this saves more energy
    than it costs."""
    for k in range(P.reads_at[op], P.reads_at[op + 1]):
        t = P.reads[k]
        for j in range(P.flow.readers_at[t], P.flow.readers_at[t + 1]):
            sibling = P.flow.readers[j]
            if sibling == op or sibling == P.cost.size - 1 or is_spent(P, S, sibling):
                continue
            stop = S.links.slot[node]
            saved, server = relief(P, S, sibling, slot, stop)
            if server < 0 or saved <= supply(P, S, sibling, stop):
                continue
            if not has_room(S, 1) or S.number[LOGGED] + ROOM > S.log.shape[0]:
                return
            do_insert(P, S, sibling, node)
            S.queue[0] = server
            sweep(P, S, 1)


@inner
def hold_inputs(P: Problem, S: State, op: int, slot: int) -> None:
    """Keep the tensors that ``op`` reads at a slot resident longer, where this is now cheaper than to compute them
    again later.

    The later runs that compute them again are removed.
    """
    for k in range(P.reads_at[op], P.reads_at[op + 1]):
        t = P.reads[k]
        again = S.links.next[copy_before(P.flow, S.links, t, slot)]
        if again < 0 or not is_spare(P, S, again) or S.number[LOGGED] + ROOM > S.log.shape[0]:
            continue
        if -np.inf < removal(P, S, again) < 0.0:
            take_out(P, S, again)


@inner
def removal(P: Problem, S: State, node: int) -> float:
    """Return an estimate of the increase of the energy (cost + price · bytes over the budget) if a run is removed
    and earlier runs serve its readers.

    It is exact if the run reads nothing and writes one tensor; -inf if other runs may become useless, too.
    """
    op, slot, links = S.op[node], S.links.slot[node], S.links
    rise = -P.cost[op] - S.value[PRICE] * max(0.0, S.mem[slot] - S.cap[slot])
    for k in range(P.writes_at[op], P.writes_at[op + 1]):
        t = P.writes[k]
        if end_of(P.flow, links, t, node, -1) > slot:
            end = end_of(P.flow, links, t, copy_before(P.flow, links, t, slot), -1)
            rise += S.value[PRICE] * price(S.mem, S.cap, end + 1, slot - 1, P.size[t])
    if rise <= 0.0:
        return float(rise)
    for k in range(P.reads_at[op], P.reads_at[op + 1]):
        t = P.reads[k]
        server = copy_before(P.flow, links, t, slot)
        end = end_of(P.flow, links, t, server, node)
        if end < slot:
            maker = S.op[server]
            if end == links.slot[server] and S.runs[maker] > P.least[maker]:
                return -np.inf
            rise += S.value[PRICE] * price(S.mem, S.cap, end + 1, slot - 1, -P.size[t])
    return float(rise)


@inner
def remove_run(P: Problem, S: State, allowed: float) -> bool:
    """Remove a random repeated run, unless the energy (cost + price · bytes over the budget) would rise by more than
    ``allowed``. Return whether a run was removed."""
    node = random_spare(P, S)
    if node < 0 or removal(P, S, node) > allowed:
        return False
    take_out(P, S, node)
    return True


@inner
def best_drop(P: Problem, S: State, slot: int, allowed: float) -> tuple[int, int]:
    """Choose, of a few random tensors that are unused across a slot (position), the one that pays most to free and
    recompute. Return its op, and the run in front of which the op runs again; the op is -1 if none is worth trying."""
    most, place, chosen = -allowed, -1, -1
    for _ in range(1 + below(S.random, TENSORS_DRAWN)):
        reader, t, _ = idle_tensor(P, S, slot)
        if reader < 0:
            break
        op = P.flow.producer[t]
        if is_spent(P, S, op):
            continue
        node = early_place(P, S, op, slot, reader) if uniform(S.random) < EARLY else reader
        saved, _ = relief(P, S, op, slot, S.links.slot[node])
        if saved > most:
            saved -= supply(P, S, op, S.links.slot[node])
        if saved > most:
            most, place, chosen = saved, node, op
    return chosen, place


@inner
def drop_with_siblings(P: Problem, S: State, slot: int, allowed: float) -> bool:
    """Free a tensor that is unused across a slot and recompute it later, together with other tensors for which this
    becomes cheaper (`drop_siblings`).

    Return False if there was nothing to free. ``allowed``: the largest increase of the energy.
    """
    if slot + 1 >= S.at.size or P.size.size == 0:
        return False
    op, place = best_drop(P, S, slot, allowed)
    if op < 0:
        return False
    length = collect(P, S, op, S.links.slot[place], allowed + S.value[PRICE] * S.value[PENALTY])
    if length == 0 or not has_room(S, length):
        return False
    place_chain(P, S, place, length)
    if uniform(S.random) < TOGETHER:
        for k in range(length):
            if S.links.slot[S.chain[k]] >= 0:
                drop_siblings(P, S, S.op[S.chain[k]], place, slot)
    if uniform(S.random) < TOGETHER:
        for k in range(length):
            if S.links.slot[S.chain[k]] >= 0:
                hold_inputs(P, S, S.op[S.chain[k]], S.links.slot[S.chain[k]])
    return True
