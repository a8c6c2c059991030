"""The moves of simulated annealing for problems without phases, in which ops read many tensors and tensors have many
readers.

A *drop* frees a tensor early and recomputes it later. It is cheap only while the inputs of the tensor's op are
resident. So drops help or hinder each other, like the vertices of an independent set: an input that stays resident
for one drop can also serve the recomputation of other tensors, but cannot be dropped itself. Therefore one move
combines a drop with other drops that the same resident inputs make cheap (`drop_siblings`), and reverts drops of
tensors that would now be cheaper to keep (`hold_inputs`). The move is kept or undone as a whole.

Source: the combination is that of a local search for independent sets (Andrade, Resende, Werneck 2012): insert a
vertex, remove its neighbours, insert vertices that have become free.
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

TRIES = 24  # draws of a tensor that is live but unused, before a move fails
EARLY = 0.5  # share of the recomputations that are tried while their inputs are still live
TENSORS_DRAWN = 2  # the largest number of tensors drawn, of which the best is dropped
TOGETHER = 0.5  # share of the moves with `drop_siblings`, and share of those with `hold_inputs`
ROOM = 64  # log lines that are left free for the runs that become useless


@inner
def idle_tensor(P: Problem, S: State, slot: int) -> tuple[int, int, int]:
    """Return a random tensor that is live at ``slot`` (a position in the annealer's sequence of op executions) but
    not used there, so that it could be freed and recomputed.

    The result has three numbers: the run that reads the tensor next, the tensor, and the slot of its last use before
    ``slot``. They are (-1, -1, -1) if no draw finds a tensor.
    """
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
    """Return the positions in the annealer's sequence of the last use of ``tensor`` before the position ``slot``, and
    of the first read after it. Only uses of the result of the run (op execution) ``server`` count, not those of a
    later recomputation.

    The first number is the slot of ``server`` if nothing reads the tensor before ``slot``. The second is `NO_SLOT` if
    the tensor is read at ``slot`` itself, or never after it.
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
    """Return a lower estimate of the energy (cost + price · bytes over the budget) saved if ``op`` runs again just
    before the position ``stop`` of the annealer's sequence of op executions (runs), and the earlier run of ``op``
    whose results can then be freed earlier.

    Memory is saved for those results that are unused from the position ``slot`` to ``stop`` and read later. The cost
    of ``op`` is subtracted, unless the earlier run can then be removed. The cost of keeping the inputs of ``op``
    resident until ``stop`` is not subtracted. The run is -1 if no memory is saved. The result is (0.0, -1) if a
    tensor of ``op`` has not been written before ``slot``, or is written again between ``slot`` and ``stop``.
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
    """Recompute the results of further ops just before the run (op execution) ``node``, so that their earlier results
    are freed before ``slot``, a position in the annealer's sequence. The ops are those that share an input with
    ``op``, if this saves more energy (cost + price · bytes over the budget) than it costs."""
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
    """Keep the inputs of ``op``, which runs at ``slot`` (a position in the annealer's sequence of op executions),
    resident longer if that is now cheaper than to recompute them later. The later runs that recompute them are
    removed."""
    for k in range(P.reads_at[op], P.reads_at[op + 1]):
        t = P.reads[k]
        again = S.links.next[copy_before(P.flow, S.links, t, slot)]
        if again < 0 or not is_spare(P, S, again) or S.number[LOGGED] + ROOM > S.log.shape[0]:
            continue
        if -np.inf < removal(P, S, again) < 0.0:
            take_out(P, S, again)


@inner
def removal(P: Problem, S: State, node: int) -> float:
    """Return an estimate of the increase of the energy (cost + price · bytes over the budget) if the run ``node`` is
    removed from the annealer's sequence of op executions (runs). Later reads of its results then use those of earlier
    runs.

    The estimate is exact if the run reads nothing and writes one tensor. It is -inf if an earlier run from which this
    one reads may become useless, too.
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
    """Remove a random run of an op that runs more often than it must from the annealer's sequence of op executions
    (runs), unless the energy (cost + price · bytes over the budget) would rise by more than ``allowed``. Return
    whether a run was removed."""
    node = random_spare(P, S)
    if node < 0 or removal(P, S, node) > allowed:
        return False
    take_out(P, S, node)
    return True


@inner
def best_drop(P: Problem, S: State, slot: int, allowed: float) -> tuple[int, int]:
    """Draw a few random tensors that are live but unused at ``slot`` (a position in the annealer's sequence of op
    executions), and choose the one whose recomputation saves the most energy. Return the op that writes it, and the
    run before which to run that op again.

    The op is -1 if every choice would raise the energy by ``allowed`` or more.
    """
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
    """Free a tensor that is live but unused at ``slot`` (a position in the annealer's sequence of op executions), and
    recompute it later. Do the same, at random, with other tensors for which this becomes cheaper (`drop_siblings`).

    Return False, and change nothing, if there is no such tensor or the recomputations cannot be inserted.
    ``allowed``: the largest increase of the energy, which is cost + price · bytes over the budget.
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
