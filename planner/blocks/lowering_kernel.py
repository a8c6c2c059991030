"""The compiled loop of `lowering`, which explains the method; hundreds of partitions are compared."""

from __future__ import annotations

import numpy as np

from rematplan.planner.arrays.csr import CSRGraph
from rematplan.planner.caches.numba_kernels import kernel
from rematplan.planner.core.array_types import Flags, Ints


@kernel
def lowered(traffic: CSRGraph, block: Ints, blocks: int, kept: Flags) -> Ints:
    """Return the positions of the ops that run, in order, recomputations included. ``block``: by forward op, the number
    of its block. ``blocks``: how many there are. ``kept``: by tensor, whether it stays resident for the backward
    half. Outputs and all results of the last block stay as well."""
    ops = len(traffic.forward)
    resident = kept | traffic.wanted
    for o in range(ops):
        if traffic.forward[o] and block[o] == blocks - 1:
            resident[_writes(traffic, o)] = True
    stage = _stage_by_op(traffic, block, kept)
    # A forward op runs at most twice, because recomputed tensors count as resident.
    runs = np.empty(2 * ops, dtype=np.int64)
    count = 0
    for o in np.argsort(block, kind="mergesort"):
        if traffic.forward[o]:
            runs[count] = o
            count += 1
    # Just before a backward op, run those forward ops again whose results it needs and which are not
    # resident.
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
def _stage_by_op(traffic: CSRGraph, block: Ints, kept: Flags) -> Ints:
    """Return the stage of each backward op: the smallest block whose freed results it needs, directly or through
    earlier backward ops. An op that needs none has the largest stage of its dependents. Backward ops run by falling
    stage; the entries of forward ops mean nothing."""
    forward, producer = traffic.forward, traffic.producer
    free = len(forward)  # the stage of an op that waits for no block
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
    # An op that waits for no block runs as late as its first dependent, so that its results are not
    # resident earlier than needed.
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
    """Write to ``again`` the forward ops that must run again before ``op``. They write a tensor that is not resident,
    and that ``op`` or another of them reads. Return their number. They are in no order; ``asked`` is scratch space."""
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
