"""The moves for problems without phases, in which tensors have many readers. A *drop* frees a tensor and
recomputes it later.

It is cheap while its op's inputs are resident, so one move combines it with drops that these make cheap, and
reverts others: a local search for independent sets (Andrade, Resende, Werneck 2012).
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
    NO_RUN,
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

TRIES = 24  # draws of a tensor that is live but unused, before a move fails
EARLY = 0.5  # share of the recomputations that are tried while their inputs are still live
TENSORS_DRAWN = 2  # the largest number of tensors drawn, of which the best is dropped
TOGETHER = 0.5  # share of the moves with `drop_siblings`, and share of those with `hold_inputs`
ROOM = 64  # log lines that are left free for the runs that become useless


@inner
def idle_tensor(P: Problem, S: State, slot: int) -> tuple[int, int, int]:
    """Return a random tensor that is live but unused at ``slot``: (next reader, tensor, slot of its last use). Three
    times -1 if `TRIES` draws find none."""
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
    """Return two slots at which ``tensor`` is read as the run ``server`` wrote it: the last before ``slot`` (that of
    ``server`` if there is none), and the first after it. The second is `NO_SLOT` if the tensor is read at ``slot``, or
    not after it."""
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
    """Return about how much energy is saved if ``op`` runs again just before ``stop`` and its results, unused at
    ``slot``, are freed until then. Holding its inputs is not counted. Second result: the earlier run that wrote these
    results; -1 if nothing is freed, as when a result is written between ``slot`` and ``stop`` or not before."""
    saved, server, unread = 0.0, -1, True
    for k in range(P.writes_at[op], P.writes_at[op + 1]):
        t = P.writes[k]
        before = copy_before(P.flow, S.links, t, stop)
        if before < 0 or S.links.slot[before] >= slot:
            return 0.0, -1
        end = last_read(P.flow, S.links, t, S.links.slot[before], stop, NO_RUN)
        unread = unread and end == S.links.slot[before]
        if end < slot and end_of(P.flow, S.links, t, before, NO_RUN) >= stop:
            saved -= S.value[PRICE] * price(S.mem, S.cap, end + 1, stop - 1, -P.size[t])
            server = before
    # The earlier run cannot be removed. The cost of holding the inputs until ``stop`` is not counted.
    if not unread or server < 0 or (S.links.prev[server] < 0 and not keeps_order_at(P, S, op, stop)):
        saved -= P.cost[op]
    return saved, server


@inner
def drop_siblings(P: Problem, S: State, op: int, node: int, slot: int) -> None:
    """Insert, directly before the run ``node``, ops that share an input with ``op``. An op is inserted if freeing its
    earlier results, unused at ``slot``, saves more energy than it costs. The loop ends early if nodes, slots or log
    lines run short."""
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
    """Hold inputs of ``op``, which runs at ``slot``, until the next run that recomputes them, and remove that run. This
    is done for inputs for which `removal` estimates that it lowers the energy. Nothing is removed while log lines are
    short."""
    for k in range(P.reads_at[op], P.reads_at[op + 1]):
        t = P.reads[k]
        again = S.links.next[copy_before(P.flow, S.links, t, slot)]
        if again < 0 or not is_spare(P, S, again) or S.number[LOGGED] + ROOM > S.log.shape[0]:
            continue
        if -np.inf < removal(P, S, again) < 0.0:
            take_out(P, S, again)


@inner
def removal(P: Problem, S: State, node: int) -> float:
    """Return an estimate of the increase of the energy if the run ``node`` is removed. It is -inf if holding the node's
    results costs more than its run saves, and a run from which it reads may become useless."""
    op, slot, links = S.op[node], S.links.slot[node], S.links
    rise = -P.cost[op] - S.value[PRICE] * max(0.0, S.mem[slot] - S.cap[slot])
    for k in range(P.writes_at[op], P.writes_at[op + 1]):
        t = P.writes[k]
        if end_of(P.flow, links, t, node, NO_RUN) > slot:
            end = end_of(P.flow, links, t, copy_before(P.flow, links, t, slot), NO_RUN)
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
    """Remove a random spare run, unless the energy would rise by more than ``allowed`` according to the estimate
    `removal`. Return whether one was removed."""
    node = random_spare(P, S)
    if node < 0 or removal(P, S, node) > allowed:
        return False
    take_out(P, S, node)
    return True


@inner
def best_drop(P: Problem, S: State, slot: int, allowed: float) -> tuple[int, int]:
    """Return, of the ops that wrote a few random tensors unused at ``slot``, the one whose recomputation saves the most
    energy. Second result: the run before which to run it. Both are -1 if every op raises the energy by ``allowed`` or
    more, or no unused tensor is found."""
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
    """Free a tensor that is unused at ``slot`` and recompute it later; at random, treat others likewise that this makes
    cheap (`drop_siblings`), and hold inputs longer (`hold_inputs`). Return False, without a change, if no tensor can be
    freed. ``allowed``: the largest increase of the energy."""
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
