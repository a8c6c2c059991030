"""Batches for the pipeline tests, steps of plain PyTorch in one process, and the running of a schedule's step."""

from __future__ import annotations

import gc
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.nn import functional

from rematplan.pipeline.run_step import step_in_one_process
from rematplan.runtime.costs.measure import peak_above_entry

CPU = torch.device("cpu")
CUTS = ("blocks.2", "blocks.4", "blocks.6")
"""Cuts of eight blocks into four equal stages."""


def data(rows: int) -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(3)
    return torch.randn(rows, 5, generator=generator), torch.randn(rows, 1, generator=generator)


def two_pipelines(rows: int) -> tuple[DeviceMesh, tuple[torch.Tensor, ...], tuple[torch.Tensor, ...]]:
    """The mesh of two pipelines of two ranks, a batch for both pipelines, and the half of it for this process."""
    mesh, batch = init_device_mesh("cpu", (2, 2), mesh_dim_names=("data", "pipeline")), data(rows)
    return mesh, batch, tuple(t.chunk(2)[mesh["data"].get_local_rank()] for t in batch)


def loss(output: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
    return functional.mse_loss(output, target.expand_as(output))


def in_one_process(
    model: nn.Module,
    x: torch.Tensor,
    y: torch.Tensor,
    microbatches: int,
    forward: Callable[[int, torch.Tensor], torch.Tensor] | None = None,
) -> list[float]:
    """One step of plain PyTorch with the same micro-batches; the losses.

    ``forward``: from a micro-batch's number and its input to its output; the model itself by default.
    """

    def loss_of(number: int, part: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
        return loss(model(part) if forward is None else forward(number, part), target)

    return step_in_one_process(model.parameters(), loss_of, (x, y), microbatches)


def step_of(
    schedule: Any,
    stages: Sequence[Any],
    given: Sequence[Any],
    y: torch.Tensor,
    losses: list[torch.Tensor],
    **named: Any,
) -> Callable[[], None]:
    """A function that runs one step on this rank. ``given``, ``named``: the model's arguments."""
    first, last = any(s.is_first for s in stages), any(s.is_last for s in stages)

    def step() -> None:
        arguments = dict(named) if first else {}
        arguments |= {"target": y, "losses": losses} if last else {}
        schedule.step(*(given if first else ()), **arguments)

    return step


def equal_losses(losses: Sequence[torch.Tensor], wanted: Sequence[float]) -> bool | None:
    """Whether a rank's losses have the bits of one process's; None on a rank without losses."""
    return [v.item() for v in losses] == wanted if losses else None


def measured(stages: Sequence[Any], step: Callable[[], None]) -> int:
    """The peak of one step in bytes, this process's parts of parameters and buffers included."""
    states = [t for s in stages for t in (*s.submod.parameters(), *s.submod.buffers())]
    held = sum(getattr(t, "_local_tensor", t).nbytes for t in states)
    gc.collect()  # tensors of earlier tests that are freed during the step would lower its peak
    return peak_above_entry(step, CPU)[0] + held


def distance(one: torch.Tensor, other: torch.Tensor) -> float:
    return float((one.double() - other.double()).norm() / other.double().norm().clamp_min(1e-30))
