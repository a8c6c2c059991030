"""The compiled loops of `eviction_simulation`: one place of the step after another, with evictions where memory is
short.

They also run in plain Python, on lists in place of arrays.
"""

from __future__ import annotations

import math
from typing import NamedTuple

from rematplan.planner.caches.numba_kernels import inner, unlocked
from rematplan.planner.core.array_types import Flags, Floats, Ints

ANCESTORS = 60
"""The estimated cost of recomputing a tensor includes at most this many evicted tensors, itself included."""
RESIDENT, RAN, LEFT, PASSED, STAMP, DRAWN, TINY = range(7)
"""The places of `EvictionState.tally`: the resident tensors, the runs so far, the bytes left, the passes that have
ended, the last mark in `EvictionState.seen`, the noise drawn, and the size up to which tensors are evicted last."""


class Policy(NamedTuple):
    """The rule for eviction: the largest score distance^a · bytes^b / (1 + cost)^c."""

    distance: float
    """a: of the ops until the next use."""
    bytes: float
    """b: of the size."""
    cost: float
    """c: of the estimated cost of recomputation."""
    wanted: float
    """A factor of the score if an unfinished recomputation reads the tensor."""
    noise: float
    """The standard deviation of a random term of the score's logarithm."""
    backward: bool
    """Whether results of the backward half may be evicted."""
    last_first: bool
    """Whether the last missing tensor is recomputed first."""
    passes: int
    """Whether outputs may be evicted and computed again in a later pass (`passes`). 0: no; 1: in as few passes as may
    fit; 2: in one more."""


class EvictionArrays(NamedTuple):
    """The ops that every plan runs, in order, and the tensors that they write, without inputs."""

    reads_at: Ints
    """Op o reads ``reads[reads_at[o] : reads_at[o + 1]]``."""
    reads: Ints
    writes_at: Ints
    writes: Ints
    cost: Floats
    workspace: Ints
    bytes: Ints
    producer: Ints
    """By tensor: the op that writes it."""
    backward: Flags
    """By tensor: whether the op that writes it is of the backward half."""
    once: Flags
    """By op: whether it must not run again."""
    kept_from: Ints
    """By tensor: the place from which on it is not evicted: 0 for results of such ops, for outputs where their pass
    begins."""
    places: Ints
    """The ops to run, in order: in each pass what its outputs need."""
    starts: Ints
    """The places at which passes begin, and the end."""
    uses_at: Ints
    """Tensor t is used at ``uses[uses_at[t] : uses_at[t + 1]]``."""
    uses: Ints
    """The places of a tensor's readers, ascending, and the end for outputs. What may not be recomputed is also used
    with what is computed from it."""


class EvictionState(NamedTuple):
    """What a simulation has done so far."""

    tally: Ints
    """Numbers at the places `RESIDENT` to `TINY`."""
    resident: Ints
    """The tensors that are resident, in any order."""
    at: Ints
    """By tensor: its position in ``resident``, or -1."""
    wanted: Ints
    """By tensor: how many unfinished runs read it."""
    next: Ints
    """By tensor: the position in `EvictionArrays.uses` up to which its uses are over."""
    pinned: Flags
    """By tensor: whether the op that runs reads or writes it."""
    again: Floats
    """By tensor: the logarithm of what recomputing it costs, as estimated at the place ``estimated``."""
    estimated: Ints
    seen: Ints
    """By tensor: the last estimate that looked at it."""
    waiting: Ints
    spent: Flags
    """By op: whether it may not run any more."""
    stack: Ints
    """The unfinished runs: the op of the place, then what it needs."""
    tries: Ints
    """By unfinished run: how often what it reads may still be recomputed."""
    found: Ints
    """The tensors that may be evicted, with their ``scores``."""
    scores: Floats
    noise: Floats
    """Normal random numbers."""
    runs: Ints
    """The ops run, as many as may be."""


@unlocked
def simulate(T: EvictionArrays, P: Policy, S: EvictionState, first: int, last: int) -> bool:
    """Run the step's places from ``first`` up to ``last``; return False if the budget or the runs do not suffice."""
    fits, place = True, first
    while fits and place < last:
        fits = run_place(T, P, S, place)
        place += 1
    return fits


@inner
def run_place(T: EvictionArrays, P: Policy, S: EvictionState, now: int) -> bool:
    """Run a place's op after recomputing what is missing for it. The op is left out if some of its results are used
    again and all of these are resident. Return whether that succeeded."""
    if now == T.starts[S.tally[PASSED] + 1]:
        S.tally[PASSED] += 1
    op = T.places[now]
    used, there = False, True
    for k in range(T.writes_at[op], T.writes_at[op + 1]):
        if next_use(T, S, T.writes[k], now) >= 0:
            used = True
            there = there and S.at[T.writes[k]] >= 0
    if used and there:
        for k in range(T.reads_at[op], T.reads_at[op + 1]):
            drop_unused(T, S, T.reads[k], now)
        return True
    depth = 0
    begin(T, S, op, depth)
    while depth >= 0:
        top, missing = S.stack[depth], -1
        for k in range(T.reads_at[top], T.reads_at[top + 1]):
            if S.at[T.reads[k]] < 0:
                missing = T.reads[k]
                if not P.last_first:
                    break
        if missing >= 0:
            S.tries[depth] -= 1
            if S.tries[depth] == 0:
                return False
            depth += 1
            begin(T, S, T.producer[missing], depth)
            continue
        if not execute(T, P, S, top, now):
            return False
        depth -= 1
        for k in range(T.reads_at[top], T.reads_at[top + 1]):
            t = T.reads[k]
            S.wanted[t] -= 1
            if S.wanted[t] == 0:
                drop_unused(T, S, t, now)
    return True


@inner
def begin(T: EvictionArrays, S: EvictionState, op: int, depth: int) -> None:
    """Mark what ``op`` reads as wanted until it has run, and limit how often that may be recomputed."""
    S.stack[depth] = op
    S.tries[depth] = 4 * (T.reads_at[op + 1] - T.reads_at[op]) + 8
    for k in range(T.reads_at[op], T.reads_at[op + 1]):
        S.wanted[T.reads[k]] += 1


@inner
def execute(T: EvictionArrays, P: Policy, S: EvictionState, op: int, now: int) -> bool:
    """Run an op whose reads are resident, after making room for it. Return False if there is not enough room, the op
    may not run again, or there are too many runs."""
    if S.tally[RAN] >= len(S.runs) or S.spent[op]:
        return False
    S.spent[op] = T.once[op]
    first, last = T.writes_at[op], T.writes_at[op + 1]
    short = T.workspace[op] - S.tally[LEFT]
    for k in range(first, last):
        if S.at[T.writes[k]] < 0:
            short += T.bytes[T.writes[k]]
    if short > 0 and not evict(T, P, S, op, short, now):
        return False
    for k in range(first, last):
        t = T.writes[k]
        if S.at[t] < 0:
            S.at[t] = S.tally[RESIDENT]
            S.resident[S.tally[RESIDENT]] = t
            S.tally[RESIDENT] += 1
            S.tally[LEFT] -= T.bytes[t]
    S.runs[S.tally[RAN]] = op
    S.tally[RAN] += 1
    for k in range(first, last):
        if S.wanted[T.writes[k]] == 0:
            drop_unused(T, S, T.writes[k], now)
    return True


@inner
def next_use(T: EvictionArrays, S: EvictionState, tensor: int, now: int) -> int:
    """Return the next place after the present one that uses a tensor, or -1 if there is none."""
    k, end = S.next[tensor], T.uses_at[tensor + 1]
    while k < end and T.uses[k] <= now:
        k += 1
    S.next[tensor] = k
    return T.uses[k] if k < end else -1


@inner
def drop(T: EvictionArrays, S: EvictionState, tensor: int) -> None:
    """Free a tensor if it is resident."""
    at = S.at[tensor]
    if at >= 0:
        S.tally[RESIDENT] -= 1
        other = S.resident[S.tally[RESIDENT]]
        S.resident[at], S.at[other] = other, at
        S.at[tensor] = -1
        S.tally[LEFT] += T.bytes[tensor]


@inner
def drop_unused(T: EvictionArrays, S: EvictionState, tensor: int, now: int) -> None:
    """Free a tensor if nothing uses it any more."""
    if next_use(T, S, tensor, now) < 0:
        drop(T, S, tensor)


@inner
def evict(T: EvictionArrays, P: Policy, S: EvictionState, op: int, short: int, now: int) -> bool:
    """Evict the tensors with the largest scores until ``short`` more bytes are free. Return whether there were enough;
    what was evicted stays evicted if not.

    What ``op`` reads and writes stays, as do tensors that `may_go` refuses. Tiny ones are evicted last, the largest
    first.
    """
    mark(T, S, op, True)
    for tiny in (False, True):
        count = 0
        for i in range(S.tally[RESIDENT]):
            t = S.resident[i]
            if (tiny or T.bytes[t] > S.tally[TINY]) and may_go(T, P, S, t, now):
                S.found[count] = t
                S.scores[count] = float(T.bytes[t]) if tiny else score(T, P, S, t, now)
                count += 1
        while count and short > 0:
            best = 0
            for i in range(1, count):
                if S.scores[i] > S.scores[best]:
                    best = i
            count -= 1
            t = S.found[best]
            S.found[best], S.scores[best] = S.found[count], S.scores[count]
            drop(T, S, t)
            short -= T.bytes[t]
        if short <= 0:
            break
    mark(T, S, op, False)
    return short <= 0


@inner
def mark(T: EvictionArrays, S: EvictionState, op: int, pinned: bool) -> None:
    """Note whether what an op reads and writes must stay."""
    for k in range(T.reads_at[op], T.reads_at[op + 1]):
        S.pinned[T.reads[k]] = pinned
    for k in range(T.writes_at[op], T.writes_at[op + 1]):
        S.pinned[T.writes[k]] = pinned


@inner
def may_go(T: EvictionArrays, P: Policy, S: EvictionState, tensor: int, now: int) -> bool:
    """Return whether a tensor may be evicted at all."""
    if S.pinned[tensor] or now >= T.kept_from[tensor]:
        return False
    return P.backward or not T.backward[tensor] or returns(T, S, tensor, now)


@inner
def returns(T: EvictionArrays, S: EvictionState, tensor: int, now: int) -> bool:
    """Return whether a result of the backward is next used in a later pass."""
    later = T.backward[tensor] and S.wanted[tensor] == 0
    return later and bool(next_use(T, S, tensor, now) >= T.starts[S.tally[PASSED] + 1])


@inner
def score(T: EvictionArrays, P: Policy, S: EvictionState, tensor: int, now: int) -> float:
    """Return the logarithm of a tensor's score by the policy ``P``, infinite if the tensor `returns`; tensors with the
    largest scores are evicted first. A finite score uses the next random number, and keeps the cost estimated at the
    place ``now``."""
    if returns(T, S, tensor, now):
        return math.inf
    use = next_use(T, S, tensor, now)
    distance = (use if use >= 0 else 1_000_000) - now
    found = P.distance * math.log(distance) + P.bytes * math.log(T.bytes[tensor])
    if P.cost > 0:
        if S.estimated[tensor] != now:
            S.estimated[tensor] = now
            S.again[tensor] = math.log(1.0 + cost_again(T, S, tensor))
        found -= P.cost * S.again[tensor]
    if S.wanted[tensor]:
        found += math.log(P.wanted)
    S.tally[DRAWN] += 1
    return found + P.noise * float(S.noise[S.tally[DRAWN] % len(S.noise)])


@inner
def cost_again(T: EvictionArrays, S: EvictionState, tensor: int) -> float:
    """Return the estimated cost of recomputing a tensor: of the op that writes it and of those of its missing
    ancestors, at most `ANCESTORS` tensors together."""
    S.tally[STAMP] += 1
    stamp, waiting, number, total = S.tally[STAMP], 1, 1, 0.0
    S.waiting[0], S.seen[tensor] = tensor, stamp
    while waiting and number < ANCESTORS:
        waiting -= 1
        op = T.producer[S.waiting[waiting]]
        total += T.cost[op]
        for k in range(T.reads_at[op], T.reads_at[op + 1]):
            t = T.reads[k]
            if S.at[t] < 0 and S.seen[t] != stamp:
                S.seen[t] = stamp
                S.waiting[waiting] = t
                waiting += 1
                number += 1
    return total
