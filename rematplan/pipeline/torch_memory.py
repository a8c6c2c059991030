"""What PyTorch's pipeline schedules hold of a stage beside its module: messages.

Read off `torch.distributed.pipelining` (2.13): buffers to receive into are made for all micro-batches before the first;
a tensor that is sent is held until its sending is waited for, by GPipe and the schedules of several stages a rank only
as the step ends, by 1F1B until the next message; the last stage's outputs are kept, and joined at the end. Stages next
to each other on one rank hand tensors over: those take the buffers' places.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, replace

import torch

from rematplan.planner.pipeline.actions import PipelineSchedule, StagePlan
from rematplan.runtime.graph.allocator import allocated
from rematplan.runtime.pipeline.stage_modules import StageModule

ONE_MESSAGE = ("1f1b",)
"""Schedules that hold one message until the next."""


@dataclass(frozen=True)
class Neighbours:
    """Whether a stage is the first or the last, and whether the stages before and after it are on its rank."""

    first: bool
    last: bool
    before: bool
    after: bool

    @classmethod
    def of(cls, schedule: PipelineSchedule, stage: int) -> Neighbours:
        """Those of a stage of a schedule."""
        mine = schedule.stage_of_rank[schedule.rank_of(stage)]
        return cls(stage == 0, stage == schedule.stages - 1, stage - 1 in mine, stage + 1 in mine)


def held_by_torch(
    schedule: PipelineSchedule, number: int, stage: StageModule, device: torch.device
) -> StagePlan:
    """The figures of a stage that no plan changes, without states and gradients."""
    at = Neighbours.of(schedule, number)
    received = 0 if at.first else _bytes(stage.inputs, device)
    answers = 0 if at.last else _bytes([t for t in stage.outputs if t.requires_grad], device)
    sent = 0 if at.last or at.after else _bytes(stage.outputs, device)
    returned = 0 if at.first or at.before else _bytes([t for t in stage.inputs if t.requires_grad], device)
    # What is handed over is there before the buffer goes whose place it takes.
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
    ):  # the last forward's message before the first backward waits until all are done
        several = schedule.stages - number > 1
        return replace(plan, pending=returned + (sent if several else 0))
    return replace(plan, left=plan.left + sent + returned)


def handed_on(schedule: PipelineSchedule, number: int, stage: StageModule, device: torch.device) -> int:
    """Bytes of a stage's outputs that stand in the buffers of the next stage, where that is on the same rank."""
    return _bytes(stage.outputs, device) if Neighbours.of(schedule, number).after else 0


def _bytes(tensors: Iterable[torch.Tensor], device: torch.device) -> int:
    return sum(allocated(t.untyped_storage().nbytes(), device) for t in tensors)
