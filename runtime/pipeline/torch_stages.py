"""Planned stages as stages of `torch.distributed.pipelining`."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import nn
from torch.distributed import ProcessGroup
from torch.distributed.pipelining import PipelineStage

from rematplan.runtime.execute.autograd_function import finish_backward
from rematplan.runtime.module.planned_module import compiled_plan
from rematplan.runtime.pipeline.stage_modules import StageModule


def torch_stage(
    stage: StageModule,
    module: nn.Module,
    number: int,
    stages: int,
    device: torch.device,
    group: ProcessGroup | None = None,
    split: bool = False,
) -> PipelineStage:
    """A stage of PyTorch's pipelines with all that it would else infer by running modules on memory without content,
    which would spoil the statistics of a batch norm.

    Args:
        module: the stage's, planned.
        number: the stage's, of ``stages``.
        split: whether the gradients of its weights are made apart, when a schedule asks for them.
    """
    return PipelineStage(
        module,
        number,
        stages,
        device,
        input_args=stage.inputs,
        output_args=stage.outputs,
        group=group,
        dw_builder=deferred_weights(module) if split else None,
    )


def deferred_weights(module: nn.Module) -> Callable[[], Callable[..., None]]:
    """What gives, right after a backward of the planned module, a function that does the rest of it."""

    def builder() -> Callable[..., None]:
        calls = compiled_plan(module).deferred
        if not calls:  # nothing in the stage needs gradients
            return lambda: None
        call = calls.pop()
        return lambda: finish_backward(call)

    return builder
