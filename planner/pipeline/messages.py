"""The memory that a stage needs for messages, in addition to its plan, by schedule.

It was read off `torch.distributed.pipelining` (2.13). Receive buffers for all micro-batches are allocated before the
first one. A sent tensor stays in memory until its sending is waited for: with GPipe and the schedules with several
stages per rank at the end of the step, with 1F1B at the next message. Neighbouring stages on one rank pass tensors to
each other without messages; these tensors take the place of the buffers. A channel of the dataflow schedule holds one
message that is being read and one that arrives.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

from rematplan.planner.pipeline.actions import PipelineSchedule, StagePlan

ONE_MESSAGE = ("1f1b",)
"""Schedules that keep each sent message until the next one is sent."""
CHANNELS = ("dataflow",)
"""Schedules whose messages use channels with a fixed number of places."""
PLACES = 2
"""The number of places in a channel."""


@dataclass(frozen=True)
class MessageBytes:
    """The bytes of a stage's messages for one micro-batch.

    ``received``: from the stage before it, in the forward. ``answered``: from the next stage, in the backward.
    ``sent``: to the next stage. ``returned``: to the stage before it.
    """

    received: int
    answered: int
    sent: int
    returned: int


def held_for_messages(schedule: PipelineSchedule, stage: int, size: MessageBytes) -> StagePlan:
    """Return the figures of a stage that do not depend on its plan: bytes for messages, without states and gradients.

    Args:
        schedule: the pipeline's schedule.
        stage: the stage's number.
        size: the bytes of its messages.
    """
    own = schedule.stage_of_rank[schedule.rank_of(stage)]
    before, after = stage - 1 in own, stage + 1 in own
    incoming = size.received + size.answered
    if schedule.name in CHANNELS:
        return StagePlan(stage, 0, 0, 0, torch_bytes=PLACES * (incoming + size.sent + size.returned))
    # A tensor that is passed on within the rank exists before the buffer is freed whose place it takes.
    handed = max(size.sent if after else 0, size.received if before else 0)
    plan = StagePlan(stage, 0, 0, 0, torch_bytes=schedule.microbatches * incoming + handed)
    sent, returned = 0 if after else size.sent, 0 if before else size.returned
    if schedule.name in ONE_MESSAGE:
        return replace(plan, pending=returned)
    return replace(plan, left=sent + returned)
