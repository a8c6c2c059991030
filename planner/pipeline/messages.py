"""The bytes of memory that a pipeline stage needs for messages to and from other stages, for each kind of schedule.

The rules were read off `torch.distributed.pipelining`. The buffer of a received message exists from the start of the
receive to the end of the actions that need it. During these actions it counts to the memory of the micro-batch; before
them the message waits. A sent tensor stays in memory until torch drops its last reference to the tensor. This time
depends on the schedule and the version of torch, so the rows of a schedule state it (`actions.DROPS`). The outputs of
the last stage are kept, and joined after the last action. Neighbouring stages on one rank pass tensors to each other
without messages.

The dataflow schedule uses channels with *credits*: the number of messages that may be sent and not yet read. For each
credit, a channel has one buffer at the sender, for a message that is being sent, and one at the receiver, for a message
that may arrive.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from functools import lru_cache

from rematplan.ir import ProblemError
from rematplan.planner.pipeline.actions import PipelineSchedule, StagePlan
from rematplan.planner.pipeline.rank_memory import in_flight
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
"""The bytes of the numbers that PyTorch exchanges with both neighbours at that time, to connect them. A thread of gloo
may free them late, in the worst case at the end of the step. They exist once in a rank."""
DIVISOR = 16
"""The bytes of the number of micro-batches as a tensor, in two types, with which PyTorch divides a gradient."""
SLOWER = 1.02
"""The largest makespan that `least_credits` accepts, relative to the makespan with any number of credits."""


@dataclass(frozen=True)
class MessageBytes:
    """The sizes in bytes of a stage's messages for one micro-batch.

    ``received``: from the previous stage, in the forward. ``sent``: to the next stage, in the forward. ``answered``:
    from the next stage, in the backward. ``returned``: to the previous stage, in the backward. ``outputs``: the outputs
    of the last stage, which are not sent; 0 for other stages.
    """

    received: int
    answered: int
    sent: int
    returned: int
    outputs: int = 0


def message_memory(
    schedule: PipelineSchedule, stage: int, size: MessageBytes, opening: int = RANDOM_STATE
) -> StagePlan:
    """Return the bytes of memory that a stage needs for messages to and from other stages, as the fields
    ``torch_bytes``, ``received``, ``answered``, ``credits``, ``sent``, ``returned``, ``left``, ``closing``, ``opening``
    and ``ending`` of a `StagePlan`. The field ``stage`` is the stage's number; all other fields are 0.
    """
    own = schedule.stage_of_rank[schedule.rank_of(stage)]
    before, after = stage - 1 in own, stage + 1 in own
    plan = StagePlan(stage, 0, 0, 0)
    if schedule.name in CHANNELS:
        places = least_credits(schedule)
        ends = (stage > 0) + (stage < schedule.stages - 1)
        acknowledgements = ends * (places + 1)  # of a byte each
        return replace(
            plan,
            torch_bytes=places * (size.sent + size.returned) + acknowledgements,
            received=size.received,
            answered=size.answered,
            credits=places,
        )
    return replace(
        plan,
        torch_bytes=CONNECTING if stage == min(own) else 0,
        received=size.received,
        answered=size.answered,
        sent=0 if after else size.sent,
        returned=0 if before else size.returned,
        left=size.outputs,
        closing=schedule.microbatches * size.outputs,
        opening=opening,
        ending=DIVISOR,
    )


@lru_cache(maxsize=256)
def least_credits(schedule: PipelineSchedule) -> int:
    """Return the smallest number of credits with which the schedule does not deadlock, and takes at most 2 % longer
    than with unlimited credits. The *credits* are the number of messages that a stage may have sent to a neighbour that
    has not begun to use them. The result is the number of micro-batches if no smaller number suffices.

    The time is found by simulation (`replay`), with equal times of all stages and a backward that takes twice as long
    as a forward. Let n + 1 be the largest difference between the numbers of micro-batches that a stage and the next one
    have in flight. In the simulation, a message to the next stage and the message that returns from it together travel
    as long as a stage takes for the forward and backward of n micro-batches (0 if n is negative).
    """
    times = [StageTimes(FORWARD, BACKWARD)] * schedule.stages
    link = Link((FORWARD + BACKWARD) * max((*_further_in_flight(schedule), 0)) / 2)
    wanted = SLOWER * replay(schedule, times, link).makespan
    for credits in range(1, schedule.microbatches):
        try:
            if replay(schedule, times, link, credits=credits).makespan <= wanted:
                return credits
        except ProblemError:  # too few
            continue
    return schedule.microbatches


def _further_in_flight(schedule: PipelineSchedule) -> Iterator[int]:
    """Yield, for each stage except the last, the number of micro-batches that it has in flight, minus that of the next
    stage, minus 1."""
    most = {stage: n for row in schedule.actions for stage, n in in_flight(row).items()}
    return (most[stage] - most[stage + 1] - 1 for stage in range(schedule.stages - 1))
