"""Pipeline stages that run plans, in the form that `torch.distributed.pipelining` expects."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn
from torch.distributed import P2POp, ProcessGroup
from torch.distributed.pipelining import PipelineStage

from rematplan.module.plan_access import HasRunner, deferred_backwards
from rematplan.runtime.execute.compiled_plan import finish_backward
from rematplan.runtime.pipeline.stage_modules import StageModule

META = torch.device("meta")


class _Stage(PipelineStage):
    """A stage that allocates the buffer of a message when it begins to receive it; `PipelineStage` does so before a
    step. If it is not the first, it drops keyword arguments. Arguments need not be tensors: the planned module's guards
    check them."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._receives: dict[tuple[str, int], list[P2POp]] = {}

    def _prepare_forward_infra(self, *args: Any, **kwargs: Any) -> Any:
        with self._without_memory():
            return super()._prepare_forward_infra(*args, **kwargs)

    def _prepare_backward_infra(self, *args: Any, **kwargs: Any) -> Any:
        with self._without_memory():
            return super()._prepare_backward_infra(*args, **kwargs)

    @contextmanager
    def _without_memory(self) -> Iterator[None]:
        device, self.device = self.device, META
        try:
            yield
        finally:
            self.device = device

    def get_fwd_recv_ops(self, fwd_chunk_id: int) -> list[P2POp]:
        """Allocate the buffers for the inputs of a micro-batch, and return the operations that receive them."""
        _move(self.args_recv_info[fwd_chunk_id], self.device)
        ops = super().get_fwd_recv_ops(fwd_chunk_id)
        self._receives["F", fwd_chunk_id] = ops
        return ops

    def get_fwd_send_ops(self, fwd_chunk_id: int) -> list[P2POp]:
        """Return the operations that send a micro-batch's outputs, without their graphs."""
        ops = super().get_fwd_send_ops(fwd_chunk_id)
        # PyTorch 2.11 sends them with graphs, which hold the stage's inputs until then.
        for op in ops:
            op.tensor = op.tensor.detach()
        return ops

    def get_bwd_recv_ops(self, bwd_chunk_id: int) -> list[P2POp]:
        """Allocate the buffers for the output's gradients of a micro-batch, and return the operations that receive
        them."""
        _move(self.grad_recv_info.get(bwd_chunk_id, ()), self.device)
        ops = super().get_bwd_recv_ops(bwd_chunk_id)
        self._receives["B", bwd_chunk_id] = ops
        return ops

    def _retrieve_recv_activations(self, fwd_chunk_id: int) -> Any:
        received = super()._retrieve_recv_activations(fwd_chunk_id)
        self._hand_over("F", fwd_chunk_id, self.args_recv_info[fwd_chunk_id])
        return received

    def _retrieve_recv_grads(self, bwd_chunk_id: int) -> Any:
        infos = self.grad_recv_info[bwd_chunk_id]
        for info in _buffered(infos):
            if info.buffer.device == META:  # the next stage is on this rank, and gave no gradient
                info.buffer = torch.zeros_like(info.buffer, device=self.device)
        received = super()._retrieve_recv_grads(bwd_chunk_id)
        self._hand_over("B", bwd_chunk_id, infos)
        return received

    def _hand_over(self, kind: str, chunk: int, infos: Iterable[Any]) -> None:
        """Give up all references to a received message of micro-batch ``chunk``."""
        _move(infos, META)
        # Some schedules keep this list of operations.
        self._receives.pop((kind, chunk), []).clear()

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

    def backward_one_chunk(
        self,
        bwd_chunk_id: int,
        loss: torch.Tensor | None = None,
        full_backward: bool = True,
        last_backward: bool = False,
    ) -> None:
        """Run the backward of a micro-batch, and detach its loss."""
        super().backward_one_chunk(bwd_chunk_id, loss, full_backward, last_backward)
        # PyTorch keeps all losses to the end of a step; their graphs hold the last stage's inputs.
        if loss is not None and not loss._is_view():
            loss.detach_()

    def _validate_fwd_input(self, args: object, kwargs: object) -> None:
        """Accept any arguments: PyTorch 2.11 would refuse those of the first stage that are not tensors. Later versions
        do not call this."""


def _buffered(infos: Iterable[Any]) -> list[Any]:
    """Return the records of PyTorch that have a buffer. Those of the model's arguments have none, and neither have
    those of outputs without a gradient."""
    return [info for info in infos if getattr(info, "buffer", None) is not None]


def _move(infos: Iterable[Any], device: torch.device) -> None:
    """Replace each buffer of PyTorch's records by an uninitialised tensor like it on ``device``."""
    for info in _buffered(infos):
        info.buffer = torch.empty_like(info.buffer, device=device).requires_grad_(info.buffer.requires_grad)


def torch_stage(
    stage: StageModule,
    module: nn.Module,
    number: int,
    stages: int,
    group: ProcessGroup | None = None,
    split: bool = False,
) -> PipelineStage:
    """Return a stage of `torch.distributed.pipelining` that runs a planned module. ``split``: whether weight gradients
    are computed later."""
    # Without these shapes PyTorch would run modules on uninitialised memory, which spoils running statistics.
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
    """Return a ``dw_builder`` for a split backward. Called directly after a backward, it returns a function that
    computes the weight gradients of that backward, or does nothing if the stage has none."""

    def builder() -> Callable[..., None]:
        # PyTorch calls this directly after the backward.
        calls = deferred_backwards(module) if isinstance(module, HasRunner) else ()
        if not calls:  # nothing in the stage needs gradients
            return lambda: None
        call = calls.pop()
        return lambda: finish_backward(call)

    return builder
