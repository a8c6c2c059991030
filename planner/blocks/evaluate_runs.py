"""Compute the peak and cost of a sequence of runs without building its schedule, to compare many candidates.

It does what `with_frees` and `simulate` do together, in one backward scan. The simulator prices every plan that is
returned; a test checks that both agree.
"""

from __future__ import annotations

from rematplan.ir import TrainingGraph
from rematplan.planner.arrays.csr import CSRGraph, Ints, traffic_of
from rematplan.planner.caches.numba_kernels import kernel


def evaluate_runs(graph: TrainingGraph, runs: Ints) -> tuple[int, float]:
    """Return the peak (bytes, inputs included) and the cost of a sequence of runs, given as positions in
    ``graph.ops``.

    Each tensor is freed as early as possible. It takes time linear in the reads and writes.
    """
    peak, cost = _scan(traffic_of(graph), runs)
    return int(peak), float(cost)


@kernel
def _scan(traffic: CSRGraph, runs: Ints) -> tuple[int, float]:
    """Scan the runs backwards. ``wanted``: tensors whose next event is a read; ``live``: their bytes."""
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
