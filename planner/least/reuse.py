"""Shorten a sequence of runs within a budget: what will be computed again stays, and its later runs are left
out.

If memory is short, what is read latest goes (Belady 1966). A pass takes linear time.
"""

from __future__ import annotations

import numpy as np

from rematplan.planner.arrays.csr import compressed_rows
from rematplan.planner.caches.numba_kernels import inner, kernel
from rematplan.planner.core.array_types import Flags, Ints
from rematplan.planner.least.demands import Demands

NEVER = 2**60
PASSES = 12
"""The largest number of passes. Each finds runs whose results nothing reads any more."""


@kernel
def useful(runs: Ints, reads_at: Ints, reads: Ints, writes_at: Ints, writes: Ints, output: Flags) -> Flags:
    """Return, for each run, whether an output needs it, directly or through later runs."""
    want, kept = output.copy(), np.zeros(runs.size, np.bool_)
    for i in range(runs.size - 1, -1, -1):
        op, needed = runs[i], False
        for k in range(writes_at[op], writes_at[op + 1]):
            needed |= want[writes[k]]
        if needed:
            kept[i] = True
            for k in range(writes_at[op], writes_at[op + 1]):
                want[writes[k]] = False
            for k in range(reads_at[op], reads_at[op + 1]):
                want[reads[k]] = True
    return kept


@kernel
def places(runs: Ints, row_at: Ints, row: Ints, tensors: int) -> tuple[Ints, Ints]:
    """Return, for each tensor, the positions in ``runs`` of the runs whose op has it in ``row``, as compressed sparse
    rows. ``row_at``, ``row``: by op, what it reads, or what it writes."""
    at = np.zeros(tensors + 1, np.int64)
    for op in runs:
        for k in range(row_at[op], row_at[op + 1]):
            at[row[k] + 1] += 1
    at = np.cumsum(at)
    filled, found = at[:-1].copy(), np.empty(at[-1], np.int64)
    for i in range(runs.size):
        for k in range(row_at[runs[i]], row_at[runs[i] + 1]):
            found[filled[row[k]]] = i
            filled[row[k]] += 1
    return at, found


@inner
def upcoming(t: int, nexts: Ints, at: Ints, found: Ints) -> int:
    """Return the next position in ``found`` of a run that has tensor ``t``; `NEVER` if there is none."""
    return int(found[nexts[t]]) if nexts[t] < at[t + 1] else NEVER


@inner
def is_awaited(
    t: int, next_read: Ints, read_at: Ints, read: Ints, next_write: Ints, write_at: Ints, written: Ints,
    output: Flags,
) -> bool:  # fmt: skip
    """Return whether the present content of tensor ``t`` is read before it is written again, or is an output."""
    reader = upcoming(t, next_read, read_at, read)
    writer = upcoming(t, next_write, write_at, written)
    return bool((reader <= writer and reader < NEVER) or (writer == NEVER and output[t]))


@inner
def drop(t: int, listed: Ints, count: int, place: Ints) -> int:
    """Remove tensor ``t`` from the list of resident ones, in place. Return how many are left."""
    count -= 1
    last = listed[count]
    listed[place[t]], place[last] = last, place[t]
    place[t] = -1
    return count


@kernel
def replay(
    runs: Ints, reads_at: Ints, reads: Ints, writes_at: Ints, writes: Ints, size: Ints, workspace: Ints,
    output: Flags, budget: int,
) -> Flags:  # fmt: skip
    """Return, by run, whether it is needed if results stay resident within ``budget`` bytes. Of results that a later
    run computes again, those read last go first; if none is left, the budget is exceeded."""
    tensors = size.size
    read_at, read = places(runs, reads_at, reads, tensors)
    write_at, written = places(runs, writes_at, writes, tensors)
    next_read, next_write = read_at[:-1].copy(), write_at[:-1].copy()
    kept = np.zeros(runs.size, np.bool_)
    listed, place, count, live = np.empty(tensors, np.int64), np.full(tensors, -1), 0, np.int64(0)
    pinned = np.full(tensors, -1)
    for i in range(runs.size):
        op, needed, more = runs[i], False, workspace[runs[i]]
        for k in range(writes_at[op], writes_at[op + 1]):
            t = writes[k]
            next_write[t] += 1
            pinned[t] = i
            if place[t] < 0:
                more += size[t]
                needed |= is_awaited(t, next_read, read_at, read, next_write, write_at, written, output)
        for k in range(reads_at[op], reads_at[op + 1]):
            pinned[reads[k]] = i
        # Of tensors that a later run computes again before they are read, the one read last goes first.
        while needed and live + more > budget:
            worst, latest = -1, -1
            for j in range(count):
                t = listed[j]
                reader = upcoming(t, next_read, read_at, read)
                if pinned[t] == i or reader <= latest:
                    continue
                if not is_awaited(t, next_read, read_at, read, next_write, write_at, written, output):
                    worst, latest = t, reader
            if worst < 0:
                break
            live -= size[worst]
            count = drop(worst, listed, count, place)
        kept[i] = needed
        if needed:
            for k in range(writes_at[op], writes_at[op + 1]):
                t = writes[k]
                if place[t] < 0:
                    listed[count], place[t] = t, count
                    count += 1
                    live += size[t]
        for k in range(reads_at[op], reads_at[op + 1]):
            next_read[reads[k]] += 1
        for at, row in ((reads_at, reads), (writes_at, writes)):
            for k in range(at[op], at[op + 1]):
                t = row[k]
                if next_read[t] == read_at[t + 1] and not output[t] and place[t] >= 0:
                    live -= size[t]
                    count = drop(t, listed, count, place)
    return kept


def shortened(demands: Demands, runs: list[int], budget: int) -> list[int]:
    """Return a sequence of runs (positions in `Demands.ops`) with the same outputs, without those that are useless or
    that the budget makes needless. ``budget``: bytes without inputs. The result exceeds it only if ``runs`` does."""
    flow = (*compressed_rows(demands.reads), *compressed_rows(demands.writes))
    sizes, output = np.array(demands.sizes, np.int64), np.zeros(len(demands.sizes), np.bool_)
    output[list(demands.outputs)] = True
    left = np.array(runs, np.int64)
    for _ in range(PASSES):
        left = left[useful(left, *flow, output)]
        kept = replay(left, *flow, sizes, demands.tables.workspace, output, budget)
        if kept.all():
            break
        left = left[kept]
    return [int(v) for v in left]
