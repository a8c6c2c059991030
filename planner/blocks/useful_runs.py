"""Remove repeated runs that serve no purpose."""

from __future__ import annotations

import numpy as np

from rematplan.planner.arrays.csr import CSRGraph, Flags, Ints
from rematplan.planner.caches.numba_kernels import kernel


@kernel
def useful_runs(traffic: CSRGraph, runs: Ints, once: Flags) -> Ints:
    """Return the sequence (base positions) without useless repeated runs. First runs are kept.

    A repeated run is useless if nobody reads what it writes before it is written again. It is also removed if it
    writes a tensor that must not be written twice (``once``). One backward scan, in which what only useless runs
    read is not wanted either. O(reads + writes).
    """
    first = np.full(len(traffic.forward), -1, dtype=np.int64)
    for at in range(len(runs) - 1, -1, -1):
        first[runs[at]] = at
    wanted = traffic.wanted.copy()
    kept = np.zeros(len(runs), dtype=np.bool_)
    for at in range(len(runs) - 1, -1, -1):
        o = runs[at]
        writes = traffic.writes[traffic.writes_at[o] : traffic.writes_at[o + 1]]
        useful = first[o] == at
        if not useful:
            for t in writes:
                useful = useful or wanted[t]
            for t in writes:
                useful = useful and not once[t]
        if not useful:
            continue
        kept[at] = True
        for t in writes:
            wanted[t] = False
        for t in traffic.reads[traffic.reads_at[o] : traffic.reads_at[o + 1]]:
            wanted[t] = True
    return runs[kept]
