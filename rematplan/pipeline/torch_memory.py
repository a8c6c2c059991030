"""The memory that PyTorch needs for the messages, outputs and losses of a pipeline stage."""

from __future__ import annotations

from collections.abc import Iterable

import torch

from rematplan.planner.pipeline.actions import PipelineSchedule
from rematplan.planner.pipeline.messages import CHANNELS, RANDOM_STATE, message_memory
from rematplan.planner.pipeline.stage_plan import MessageBytes, StagePlan
from rematplan.runtime.graph.allocator_rounding import allocated
from rematplan.runtime.graph.compat import STEPS_COPY_RANDOM_STATE
from rematplan.runtime.pipeline.stage_modules import StageModule

OPENING = RANDOM_STATE if STEPS_COPY_RANDOM_STATE else 0
"""The bytes that the installed version of PyTorch allocates while it prepares the first step of a pipeline."""
LOSS_BYTES = 8
"""The most bytes of a micro-batch's loss, which PyTorch keeps until the end of the step."""


def stage_torch_memory(
    schedule: PipelineSchedule, number: int, stage: StageModule, device: torch.device
) -> StagePlan:
    """Return a `StagePlan` with only the memory for a stage's messages, outputs and losses; all other fields are 0."""
    first, last = number == 0, number == schedule.stages - 1
    inputs, outputs = ([] if first else stage.inputs), ([] if last else stage.outputs)
    back = schedule.name in CHANNELS  # a message back has the activations too
    size = MessageBytes(
        received=_bytes(inputs, device),
        answered=_backward_message_bytes(outputs, back, device),
        sent=_bytes(outputs, device),
        returned=_backward_message_bytes(inputs, back, device),
    )
    kept, loss = (_bytes(stage.outputs, device), allocated(LOSS_BYTES, device)) if last else (0, 0)
    return message_memory(schedule, number, size, kept, OPENING).adding(left=loss)


def handed_on(schedule: PipelineSchedule, number: int, stage: StageModule, device: torch.device) -> int:
    """Return the bytes of one micro-batch's outputs if the next stage, on the same rank, counts them; else 0."""
    mine = schedule.stage_of_rank[schedule.rank_of(number)]
    return output_bytes(stage, device) if number + 1 in mine else 0


def output_bytes(stage: StageModule, device: torch.device) -> int:
    """Return the bytes of a stage's outputs for one micro-batch, as the allocator of ``device`` rounds them."""
    return _bytes(stage.outputs, device)


def _backward_message_bytes(tensors: Iterable[torch.Tensor], activations: bool, device: torch.device) -> int:
    """Return the bytes of a message in the backward: the gradients of ``tensors`` and, if ``activations``, ``tensors``
    as well."""
    found = list(tensors)
    return _bytes((t for t in found if t.requires_grad), device) + (
        _bytes(found, device) if activations else 0
    )


def _bytes(tensors: Iterable[torch.Tensor], device: torch.device) -> int:
    return sum(allocated(t.untyped_storage().nbytes(), device) for t in tensors)
