"""Leave out of a run sequence what it repeats to no use."""

from __future__ import annotations

import numpy as np

from rematplan.planner.arrays.csr import CSRGraph, Flags, Ints
from rematplan.planner.caches.numba_kernels import kernel


@kernel
def useful_runs(traffic: CSRGraph, runs: Ints, once: Flags) -> Ints:
    """The sequence, by base positions, without repeated runs that write nothing that is read before it is written
    again, or that write what must not be written twice (``once``, by tensor).

    One backward scan: what only a useless run reads is not wanted either. First runs stay. O(reads + writes).
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
