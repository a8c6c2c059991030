"""Choose cuts with which the rank that needs the most memory needs little.

A dynamic program finds cuts for estimated bytes. Then the stages of that rank change by one block, as long as
the largest peak falls.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

from rematplan.planner.pipeline.actions import PipelineSchedule
from rematplan.planner.pipeline.stage_chain import StageChain
from rematplan.planner.pipeline.stage_partition import Cuts, StageTime, partitions, shifted


def lean_cuts(
    chain: StageChain,
    schedule: PipelineSchedule,
    estimate: StageTime,
    peaks: Callable[[Cuts], Sequence[int]],
    changes: int,
) -> Cuts:
    """Return cuts with a small largest peak of a rank. The first are those with the least largest ``estimate`` (a
    stage's bytes); they are changed while the largest of ``peaks`` (each rank's bytes) falls. A change moves the
    beginning of one stage by one allowed block; at most ``changes`` are tried. `UsageError` if the chain has too few
    places for cuts."""
    best = partitions(chain, schedule.stages, estimate)[0].cuts
    if not changes:
        return best
    own = peaks(best)
    while True:
        largest = schedule.stage_of_rank[own.index(max(own))]
        ends = {best[end] for stage in largest for end in (stage - 1, stage) if 0 <= end < len(best)}
        near = [cuts for cuts in shifted(chain, best) if not ends <= set(cuts)]
        found = {cuts: peaks(cuts) for cuts in near[:changes]}
        changes -= len(found)
        lower = min(found, key=lambda cuts: max(found[cuts]), default=best)
        if not found or max(found[lower]) >= max(own):
            return best
        best, own = lower, found[lower]
