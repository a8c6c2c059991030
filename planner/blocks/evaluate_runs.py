"""The peak and cost of a sequence of runs, in one backward scan without a schedule. They equal those of
`with_frees` and `simulate`.
"""

from __future__ import annotations

from rematplan.ir import TrainingGraph
from rematplan.planner.arrays.csr import CSRGraph, traffic_of
from rematplan.planner.caches.numba_kernels import kernel
from rematplan.planner.core.array_types import Ints


def evaluate_runs(graph: TrainingGraph, runs: Ints) -> tuple[int, float]:
    """Return the peak (bytes, inputs included) and the cost of the ops ``runs`` (positions, repeats
    included), if tensors are freed as early as possible.
    """
    peak, cost = _scan(traffic_of(graph), runs)
    return int(peak), float(cost)


@kernel
def _scan(traffic: CSRGraph, runs: Ints) -> tuple[int, float]:
    """Return the peak (bytes, inputs included) and the cost of a sequence of runs, scanned from its end."""
    # A tensor is live if it is read later, or is an output, and is not written again before that.
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
