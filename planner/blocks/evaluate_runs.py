"""Compute the peak and the cost of a sequence of runs without building its schedule. This is fast enough to compare
many candidates. A run is one execution of an op.

The result is the same as that of `with_frees` and `simulate` together, but needs only one backward scan. A test checks
that both agree. Plans that are returned to the caller are simulated anyway.
"""

from __future__ import annotations

from rematplan.ir import TrainingGraph
from rematplan.planner.arrays.csr import CSRGraph, Ints, traffic_of
from rematplan.planner.caches.numba_kernels import kernel


def evaluate_runs(graph: TrainingGraph, runs: Ints) -> tuple[int, float]:
    """Return the peak (bytes, inputs included) and the cost of executing ops in the order ``runs``, if each tensor is
    freed as early as possible. ``runs``: positions in ``graph.ops``, with repetitions.

    The time is linear in the number of tensors that the runs read and write.
    """
    peak, cost = _scan(traffic_of(graph), runs)
    return int(peak), float(cost)


@kernel
def _scan(traffic: CSRGraph, runs: Ints) -> tuple[int, float]:
    """Return the peak (bytes, inputs included) and the cost of a sequence of runs, by a scan from its end to its start.

    A tensor is live at a moment if it is read later before it is written again, or if it is an output and is not
    written again. ``wanted`` marks the live tensors, and ``live`` counts their bytes and those of the inputs.
    """
    wanted = traffic.wanted.copy()
    live, cost = traffic.input_bytes, 0.0
    for t in range(len(wanted)):
        if wanted[t]:
            live += traffic.bytes[t]
    peak = traffic.input_bytes
    for at in range(len(runs) - 1, -1, -1):
        o = runs[at]
        cost += traffic.cost[o]
        reads = traffic.reads[traffic.reads_at[o] : traffic.reads_at[o + 1]]
        writes = traffic.writes[traffic.writes_at[o] : traffic.writes_at[o + 1]]
        for t in reads:  # resident while the op runs, even if nothing reads them later
            if not wanted[t]:
                wanted[t] = True
                live += traffic.bytes[t]
        before = live
        for t in writes:
            if wanted[t]:
                wanted[t] = False
                before -= traffic.bytes[t]
            else:
                live += traffic.bytes[t]
        peak = max(peak, live + traffic.workspace[o])
        live = before
    return peak, cost
