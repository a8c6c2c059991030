"""The memory that a stage needs for messages, in addition to its plan, by schedule.

It was read off `torch.distributed.pipelining` (2.13). Receive buffers for all micro-batches are allocated before the
first one. A sent tensor stays in memory until its sending is waited for: with GPipe and the schedules with several
stages per rank at the end of the step, with 1F1B at the next message. The last stage's outputs are kept, and joined
at the end. Neighbouring stages on one rank pass tensors to each other without messages; these tensors take the place
of the buffers.

A channel of the dataflow schedule has as many places as credits at each end: for messages that are being sent, and for
receives that are posted ahead.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from functools import lru_cache

from rematplan.ir import ProblemError
from rematplan.planner.pipeline.actions import PipelineSchedule, StagePlan
from rematplan.planner.pipeline.rank_memory import in_flight
from rematplan.planner.pipeline.timeline import Link, StageTimes, replay

ONE_MESSAGE = ("1f1b",)
"""Names of schedules that keep each sent message in memory until the next message is sent."""
CHANNELS = ("dataflow",)
"""Names of schedules whose messages use channels with a fixed number of places. The next stage sends a stage's
outputs back to it in the backward."""
FORWARD, BACKWARD = 1.0, 2.0
"""Time units of a stage's actions, for the choice of credits."""
SLOWER = 1.02
"""The largest makespan with few credits, relative to the makespan with any number of credits; see `least_credits`."""


@dataclass(frozen=True)
class MessageBytes:
    """The sizes in bytes of a stage's messages for one micro-batch.

    ``received``: the message from the stage before it in the forward. ``answered``: the message from the next stage
    in the backward. ``sent``: its message to the next stage in the forward. ``returned``: its message to the stage
    before it in the backward. ``outputs``: the outputs of the last stage; 0 for other stages.
    """

    received: int
    answered: int
    sent: int
    returned: int
    outputs: int = 0


def message_memory(schedule: PipelineSchedule, stage: int, size: MessageBytes) -> StagePlan:
    """Return the bytes that a stage holds for messages, as the fields ``torch_bytes``, ``left``, ``closing`` and
    ``pending`` of a `StagePlan`. All other fields are 0.

    Args:
        schedule: the pipeline's schedule.
        stage: the stage's number, from 0.
        size: the sizes of its messages for one micro-batch.

    Raises:
        ProblemError: the schedule uses channels, and deadlocks with any number of credits; see `least_credits`.
    """
    own = schedule.stage_of_rank[schedule.rank_of(stage)]
    before, after = stage - 1 in own, stage + 1 in own
    incoming, plan = size.received + size.answered, StagePlan(stage, 0, 0, 0)
    if schedule.name in CHANNELS:
        places = least_credits(schedule)
        ends = (stage > 0) + (stage < schedule.stages - 1)
        acknowledgements = ends * (places + 1)  # of a byte each
        return replace(plan, torch_bytes=places * (incoming + size.sent + size.returned) + acknowledgements)
    # A tensor that is passed on within the rank exists before the buffer is freed whose place it takes.
    handed = max(size.sent if after else 0, size.received if before else 0)
    plan = replace(
        plan,
        torch_bytes=schedule.microbatches * incoming + handed,
        left=size.outputs,
        closing=schedule.microbatches * size.outputs,
    )
    leaving = (0 if after else size.sent) + (0 if before else size.returned)
    if (
        schedule.name in ONE_MESSAGE
    ):  # the message of the last forward before the first backward waits for all others
        return replace(plan, pending=leaving)
    return replace(plan, left=plan.left + leaving)


@lru_cache(maxsize=256)
def least_credits(schedule: PipelineSchedule) -> int:
    """Return the smallest number of credits with which the schedule does not deadlock and takes at most 2 % longer
    than without a limit, as simulated by `replay`.

    With k credits, a stage may have sent up to k messages to a neighbour that has not begun to use them. The result
    is the number of micro-batches if no smaller number suffices. In the simulations all stages take equal time, and
    a backward takes twice as long as a forward. A message and its answer together travel as long as a stage takes
    for n micro-batches, where n + 1 is the largest difference of micro-batches in flight between neighbouring
    stages.

    Raises:
        ProblemError: the schedule deadlocks even without a limit.
    """
    times = [StageTimes(FORWARD, BACKWARD)] * schedule.stages
    link = Link((FORWARD + BACKWARD) * max((*_more(schedule), 0)) / 2)
    wanted = SLOWER * replay(schedule, times, link).makespan
    for credits in range(1, schedule.microbatches):
        try:
            if replay(schedule, times, link, credits=credits).makespan <= wanted:
                return credits
        except ProblemError:  # too few
            continue
    return schedule.microbatches


def _more(schedule: PipelineSchedule) -> Iterator[int]:
    """Yield, for each two neighbouring stages, how many more micro-batches the first has in flight than the second,
    minus 1."""
    most = {stage: n for row in schedule.actions for stage, n in in_flight(row).items()}
    return (most[stage] - most[stage + 1] - 1 for stage in range(schedule.stages - 1))
