"""Removal of the op executions of a sequence that the budget does not need, such as needless recomputations."""

from __future__ import annotations

from rematplan.planner.annealing.dead_runs import is_spare, queue_servers, sweep
from rematplan.planner.annealing.edits import commit, do_remove, undo
from rematplan.planner.annealing.state import HALF, PENALTY, Problem, State
from rematplan.planner.caches.numba_kernels import kernel
from rematplan.planner.core.array_types import Ints


@kernel
def tidy(P: Problem, S: State, order: Ints) -> None:
    """Remove runs, with the runs whose results only they read, as long as the sequence stays valid and within the
    budget. Ops are tried in ``order`` until nothing changes. A sequence over the budget is not changed."""
    if S.value[PENALTY] >= HALF:
        return
    removed = True
    while removed:
        removed = False
        for op in order:
            node = S.links.last[op]
            while node >= 0:
                if not is_spare(P, S, node):
                    node = S.links.prev[node]
                    continue
                slot, before = S.links.slot[node], S.links.prev[node]
                do_remove(P, S, node)
                sweep(P, S, queue_servers(P, S, op, slot, 0))
                if S.value[PENALTY] < HALF:
                    commit(S)
                    removed = True
                    # Not from the last run again: a schedule of 10^5 runs would then take minutes.
                    gone = before >= 0 and S.links.slot[before] < 0
                    node = S.links.last[op] if gone else before
                else:
                    undo(P, S)
                    node = before
