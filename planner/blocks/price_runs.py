"""Price a run sequence without making its schedule, to choose among many candidates.

The simulator prices every plan that is returned; this is the same peak in one backward scan (`with_frees` and
`simulate` at once), for the hundreds of candidates that are only compared. A test holds the two equal.
"""

from __future__ import annotations

from rematplan.ir import TrainingGraph
from rematplan.planner.arrays.csr import CSRGraph, Ints, traffic_of
from rematplan.planner.caches.numba_kernels import kernel


def price_runs(graph: TrainingGraph, runs: Ints) -> tuple[int, float]:
    """Peak (bytes, inputs included) and cost of a run sequence, by base positions. O(reads + writes)."""
    peak, cost = _scan(traffic_of(graph), runs)
    return int(peak), float(cost)


@kernel
def _scan(traffic: CSRGraph, runs: Ints) -> tuple[int, float]:
    """Backward over the runs: ``wanted`` are the tensors whose next event is a read, ``held`` their bytes."""
    wanted = traffic.wanted.copy()
    held, cost = traffic.input_bytes, 0.0
    for t in range(len(wanted)):
        if wanted[t]:
            held += traffic.bytes[t]
    peak = traffic.input_bytes
    for at in range(len(runs) - 1, -1, -1):
        o = runs[at]
        cost += traffic.cost[o]
        reads = traffic.reads[traffic.reads_at[o] : traffic.reads_at[o + 1]]
        writes = traffic.writes[traffic.writes_at[o] : traffic.writes_at[o + 1]]
        for t in reads:  # resident while the op runs, whether or not anything reads them later
            if not wanted[t]:
                wanted[t] = True
                held += traffic.bytes[t]
        before = held
        for t in writes:
            if wanted[t]:
                wanted[t] = False
                before -= traffic.bytes[t]
            else:
                held += traffic.bytes[t]
        peak = max(peak, held + traffic.workspace[o])
        held = before
    return peak, cost
