"""What a stage holds for messages beside its plan, by the schedule that sends them.

Read off `torch.distributed.pipelining` (2.13): buffers to receive into are made for all micro-batches before the first;
a tensor that is sent is held until its sending is waited for, by GPipe and the schedules of several stages a rank only
as the step ends, by 1F1B until the next message. Stages next to each other on one rank hand tensors over: those take
the buffers' places. Dataflow channels hold one message that is read and one that arrives.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

from rematplan.planner.pipeline.actions import PipelineSchedule, StagePlan

ONE_MESSAGE = ("1f1b",)
"""Schedules that hold one message until the next."""
CHANNELS = ("dataflow",)
"""Schedules whose messages go through channels of a fixed number of places."""
PLACES = 2
"""Of a channel."""


@dataclass(frozen=True)
class MessageBytes:
    """Bytes of a micro-batch's messages of a stage: from the stage before it, back from the next one, to the next one,
    and back to the one before it."""

    received: int
    answered: int
    sent: int
    returned: int


def held_for_messages(schedule: PipelineSchedule, stage: int, size: MessageBytes) -> StagePlan:
    """A stage's figures that no plan changes, without states and gradients.

    Args:
        stage: its number.
    """
    own = schedule.stage_of_rank[schedule.rank_of(stage)]
    before, after = stage - 1 in own, stage + 1 in own
    incoming = size.received + size.answered
    if schedule.name in CHANNELS:
        return StagePlan(stage, 0, 0, 0, torch_bytes=PLACES * (incoming + size.sent + size.returned))
    # What is handed over is there before the buffer goes whose place it takes.
    handed = max(size.sent if after else 0, size.received if before else 0)
    plan = StagePlan(stage, 0, 0, 0, torch_bytes=schedule.microbatches * incoming + handed)
    sent, returned = 0 if after else size.sent, 0 if before else size.returned
    if schedule.name in ONE_MESSAGE:
        return replace(plan, pending=returned)
    return replace(plan, left=sent + returned)
