"""The memory that PyTorch's pipeline schedules need for messages, in addition to a stage's module.

It was read off `torch.distributed.pipelining` (2.13). Receive buffers for all micro-batches are allocated before the
first one. A sent tensor stays in memory until its sending is waited for: with GPipe and the schedules with several
stages per rank at the end of the step, with 1F1B at the next message. The last stage's outputs are kept, and joined
at the end. Neighbouring stages on one rank pass tensors to each other without messages; these tensors take the place
of the buffers.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, replace

import torch

from rematplan.planner.pipeline.actions import PipelineSchedule, StagePlan
from rematplan.runtime.graph.allocator import allocated
from rematplan.runtime.pipeline.stage_modules import StageModule

ONE_MESSAGE = ("1f1b",)
"""Schedules that keep each sent message until the next one is sent."""


@dataclass(frozen=True)
class Neighbours:
    """Whether a stage is the ``first`` or the ``last``, and whether the stages ``before`` and ``after`` it are on its
    rank.
    """

    first: bool
    last: bool
    before: bool
    after: bool

    @classmethod
    def of(cls, schedule: PipelineSchedule, stage: int) -> Neighbours:
        """Return the neighbours of a stage in a schedule."""
        mine = schedule.stage_of_rank[schedule.rank_of(stage)]
        return cls(stage == 0, stage == schedule.stages - 1, stage - 1 in mine, stage + 1 in mine)


def held_by_torch(
    schedule: PipelineSchedule, number: int, stage: StageModule, device: torch.device
) -> StagePlan:
    """Return the figures of a stage that do not depend on its plan: bytes for messages, without states and gradients.

    ``number``: the stage's number.
    """
    at = Neighbours.of(schedule, number)
    received = 0 if at.first else _bytes(stage.inputs, device)
    answers = 0 if at.last else _bytes([t for t in stage.outputs if t.requires_grad], device)
    sent = 0 if at.last or at.after else _bytes(stage.outputs, device)
    returned = 0 if at.first or at.before else _bytes([t for t in stage.inputs if t.requires_grad], device)
    # A tensor that is passed on within the rank exists before the buffer is freed whose place it takes.
    handed = max(
        _bytes(stage.outputs, device) if at.after else 0, _bytes(stage.inputs, device) if at.before else 0
    )
    held = schedule.microbatches * (received + answers) + handed
    plan = StagePlan(number, 0, 0, 0, torch_bytes=held)
    if at.last:
        given = _bytes(stage.outputs, device)
        plan = replace(plan, left=given, closing=schedule.microbatches * given)
    if (
        schedule.name in ONE_MESSAGE
    ):  # the message of the last forward before the first backward waits for all others
        several = schedule.stages - number > 1
        return replace(plan, pending=returned + (sent if several else 0))
    return replace(plan, left=plan.left + sent + returned)


def handed_on(schedule: PipelineSchedule, number: int, stage: StageModule, device: torch.device) -> int:
    """Return the bytes of a stage's outputs that are counted as the inputs of the next stage, on the same rank; or
    0.
    """
    return _bytes(stage.outputs, device) if Neighbours.of(schedule, number).after else 0


def _bytes(tensors: Iterable[torch.Tensor], device: torch.device) -> int:
    return sum(allocated(t.untyped_storage().nbytes(), device) for t in tensors)
