"""Pipeline stages that run plans, in the form that `torch.distributed.pipelining` expects."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch import nn
from torch.distributed import ProcessGroup
from torch.distributed.pipelining import PipelineStage

from rematplan.runtime.execute.autograd_function import finish_backward
from rematplan.runtime.module.planning import HasRunner, compiled_plan
from rematplan.runtime.pipeline.stage_modules import StageModule


class _Stage(PipelineStage):
    """A stage that takes keyword arguments only if it is the first one, and whose arguments need not be tensors.

    PyTorch passes the keyword arguments of ``step`` to all stages of a rank. If the first rank also has a later stage,
    the module of the later stage would refuse them. PyTorch need not check the arguments, since guards of the planned
    module do.
    """

    def forward_one_chunk(
        self,
        fwd_chunk_id: int,
        args: tuple[Any, ...],
        kwargs: dict[str, Any] | None = None,
        save_forward_output: bool = True,
    ) -> Any:
        """Run the forward of a micro-batch. ``args``, ``kwargs``: the model's arguments for it."""
        named = kwargs if self.is_first else None
        return super().forward_one_chunk(fwd_chunk_id, args, named, save_forward_output)

    def _validate_fwd_input(self, args: object, kwargs: object) -> None:
        """PyTorch 2.11 refuses arguments of the first stage that are not tensors; later versions do not call this."""


def torch_stage(
    stage: StageModule,
    module: nn.Module,
    number: int,
    stages: int,
    group: ProcessGroup | None = None,
    split: bool = False,
) -> PipelineStage:
    """Return a stage of `torch.distributed.pipelining` that runs a planned module.

    The shapes of its inputs and outputs are passed to PyTorch. Otherwise PyTorch would infer them by running modules on
    uninitialised memory, which would spoil the running statistics of batch norms.

    Args:
        stage: descriptions of the stage's arguments and results.
        module: the stage's planned module.
        number: the stage's index.
        stages: the number of stages.
        group: the process group; None for the default one.
        split: whether the backward is split: weight gradients are computed later, when the schedule asks for them.
    """
    return _Stage(
        module,
        number,
        stages,
        stage.device,
        input_args=stage.inputs,
        output_args=stage.outputs,
        group=group,
        dw_builder=deferred_weights(module) if split else None,
    )


def deferred_weights(module: nn.Module) -> Callable[[], Callable[..., None]]:
    """Return the ``dw_builder`` that a PyTorch pipeline stage needs for a split backward (input gradients first, weight
    gradients later). PyTorch calls it directly after a backward of the planned module. It then returns a function
    without arguments that computes the weight gradients which that backward postponed. The function does nothing if
    there are none."""

    def builder() -> Callable[..., None]:
        calls = compiled_plan(module).deferred if isinstance(module, HasRunner) else ()
        if not calls:  # nothing in the stage needs gradients
            return lambda: None
        call = calls.pop()
        return lambda: finish_backward(call)

    return builder
