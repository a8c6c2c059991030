"""The bytes that a stage needs for messages to and from other stages, for each kind of schedule.

The rules were read off `torch.distributed.pipelining`. In dataflow schedules, channels have one buffer at
each end per *credit*: a message that may be sent and not yet read.
"""

from __future__ import annotations

from dataclasses import replace
from functools import lru_cache
from itertools import pairwise

from rematplan.ir import ProblemError
from rematplan.planner.pipeline.actions import PipelineSchedule
from rematplan.planner.pipeline.rank_memory import stages_in_flight
from rematplan.planner.pipeline.stage_plan import MessageBytes, StagePlan, StandingBytes
from rematplan.planner.pipeline.timeline import Link, StageTimes, replay

CHANNELS = ("dataflow",)
"""Names of schedules whose messages use channels with a fixed number of buffers. In these schedules each stage sends
its input, which it recovers, back to the previous stage in the backward."""
FORWARD, BACKWARD = 1.0, 2.0
"""The times of a stage's forward and backward, in any unit, with which `least_credits` simulates a schedule."""
RANDOM_STATE = 5056
"""The bytes of the state of PyTorch's random generator on a CPU. PyTorch copies the state while it prepares the first
step of a pipeline and allocates the buffers for messages."""
CONNECTING = 16
"""The bytes of the numbers that PyTorch exchanges with both neighbours before the first step, to connect them. They
exist once in a rank, perhaps to the end of the step: a thread of gloo may free them late."""
DIVISOR = 16
"""The bytes of the number of micro-batches as a tensor, in two types, with which PyTorch divides a gradient."""
SLOWER = 1.02
"""The largest makespan that `least_credits` accepts, relative to the makespan with any number of credits."""


def message_memory(
    schedule: PipelineSchedule,
    stage: int,
    size: MessageBytes,
    outputs: int = 0,
    opening: int = RANDOM_STATE,
) -> StagePlan:
    """Return a `StagePlan` with the bytes that a stage needs for messages; other fields are 0. ``size``: the stage's
    messages for one micro-batch.

    ``outputs``: bytes of the last stage's outputs, which are not sent; 0 for other stages. ``opening``: bytes that
    preparing the first step needs. Schedules with `CHANNELS` ignore both.
    """
    own = schedule.stage_of_rank[schedule.rank_of(stage)]
    before, after = stage - 1 in own, stage + 1 in own
    if schedule.name in CHANNELS:
        places = least_credits(schedule)
        ends = (stage > 0) + (stage < schedule.stages - 1)
        acknowledgements = ends * (places + 1)  # of a byte each
        return StagePlan(
            stage,
            messages=MessageBytes(size.received, size.answered, credits=places),
            standing=StandingBytes(torch_bytes=places * (size.sent + size.returned) + acknowledgements),
        )
    return StagePlan(
        stage,
        messages=replace(size, sent=0 if after else size.sent, returned=0 if before else size.returned),
        standing=StandingBytes(
            torch_bytes=CONNECTING if stage == min(own) else 0,
            left=outputs,
            closing=schedule.microbatches * outputs,
            opening=opening,
            ending=DIVISOR,
        ),
    )


@lru_cache(maxsize=256)
def least_credits(schedule: PipelineSchedule) -> int:
    """Return the fewest credits with which the schedule, simulated with stages of equal times, does not deadlock and
    takes at most `SLOWER` times as long as with unlimited credits.

    If there is no such number, return the number of micro-batches. `ProblemError` if even unlimited credits deadlock.
    """
    times = [StageTimes(FORWARD, BACKWARD)] * schedule.stages
    # A message and its answer together travel as long as forward and backward of n micro-batches, if a stage
    # has up to n + 1 more in flight than the next. Simulated stages take equal times.
    further = max((a - b - 1 for a, b in pairwise(stages_in_flight(schedule))), default=0)
    link = Link((FORWARD + BACKWARD) * max(further, 0) / 2)
    wanted = SLOWER * replay(schedule, times, link).makespan
    for credits in range(1, schedule.microbatches):
        try:
            if replay(schedule, times, link, credits=credits).makespan <= wanted:
                return credits
        except ProblemError:  # too few
            continue
    return schedule.microbatches
