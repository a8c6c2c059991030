"""Compute the sequence of runs of a partition of the forward in one compiled pass, because hundreds of partitions
are compared. See `lowering`."""

from __future__ import annotations

import numpy as np

from rematplan.planner.arrays.csr import CSRGraph, Flags, Ints
from rematplan.planner.caches.numba_kernels import kernel


@kernel
def lowered(traffic: CSRGraph, block: Ints, blocks: int, kept: Flags) -> Ints:
    """Return the sequence of runs of a partition of the forward into blocks, as positions in ``graph.ops``.

    The forward ops run block by block. Then the backward ops run, each preceded by the forward ops that recompute
    what it lacks. ``traffic``: the problem as arrays. ``block[o]``: the block of forward op o, from 0 to ``blocks``
    - 1. ``kept[t]``: whether tensor t stays resident between forward and backward.
    """
    ops = len(traffic.forward)
    resident = kept | traffic.wanted
    for o in range(ops):
        if traffic.forward[o] and block[o] == blocks - 1:
            resident[_writes(traffic, o)] = True
    stage = _stages(traffic, block, kept)
    runs = np.empty(
        2 * ops, dtype=np.int64
    )  # a forward op runs at most twice, because recomputed tensors count as resident
    count = 0
    for o in np.argsort(block, kind="mergesort"):
        if traffic.forward[o]:
            runs[count] = o
            count += 1
    asked = np.full(ops, -1, dtype=np.int64)
    again = np.empty(ops, dtype=np.int64)
    for o in np.argsort(-stage, kind="mergesort"):
        if traffic.forward[o]:
            continue
        found = _demand(traffic, o, resident, asked, again)
        again[:found].sort()
        for r in again[:found]:
            runs[count] = r
            count += 1
            resident[_writes(traffic, r)] = True
        runs[count] = o
        count += 1
        resident[_writes(traffic, o)] = True
    return runs[:count].copy()


@kernel
def _reads(traffic: CSRGraph, op: int) -> Ints:
    return traffic.reads[traffic.reads_at[op] : traffic.reads_at[op + 1]]


@kernel
def _writes(traffic: CSRGraph, op: int) -> Ints:
    return traffic.writes[traffic.writes_at[op] : traffic.writes_at[op + 1]]


@kernel
def _stages(traffic: CSRGraph, block: Ints, kept: Flags) -> Ints:
    """Return the stage of each backward op; it is never larger than that of an op it depends on."""
    forward, producer = traffic.forward, traffic.producer
    free = len(forward)  # waits for nothing yet
    stage = np.full(free, free, dtype=np.int64)
    for o in range(free):
        if forward[o]:
            continue
        at = free
        for t in _reads(traffic, o):
            if not forward[producer[t]]:
                at = min(at, stage[producer[t]])
            elif not (kept[t] or traffic.wanted[t]):
                at = min(at, block[producer[t]])
        before = traffic.after[o]
        if before >= 0 and not forward[before]:
            at = min(at, stage[before])
        stage[o] = at
    # An op that waits for no block runs as late as its first dependent, so that it holds nothing early.
    due = np.zeros(free, dtype=np.int64)
    for o in range(free - 1, -1, -1):
        if forward[o]:
            continue
        if stage[o] == free:
            stage[o] = due[o]
        for t in _reads(traffic, o):
            due[producer[t]] = max(due[producer[t]], stage[o])
        if traffic.after[o] >= 0:
            due[traffic.after[o]] = max(due[traffic.after[o]], stage[o])
    return stage


@kernel
def _demand(traffic: CSRGraph, op: int, resident: Flags, asked: Ints, again: Ints) -> int:
    """Write the forward ops that must run again before ``op`` into ``again``, in any order. Returns their number.

    ``asked[p]``: the last op that needed p.
    """
    found, at = 0, op
    done = 0
    while True:
        for t in _reads(traffic, at):
            p = traffic.producer[t]
            if not resident[t] and asked[p] != op and traffic.forward[p]:
                asked[p] = op
                again[found] = p
                found += 1
        if done == found:
            return found
        at = again[done]
        done += 1
