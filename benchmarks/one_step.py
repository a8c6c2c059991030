"""One training step of a model, without an optimizer, its peak, and CPU seconds."""

from __future__ import annotations

import gc
import os
from collections.abc import Callable

import torch
from torch import Tensor, nn

from rematplan.runtime.costs.measure import peak_above_entry

CPU = torch.device("cpu")


def stepper(model: nn.Module, inputs: tuple[Tensor, ...]) -> Callable[[], None]:
    """Return a function that clears the gradients and runs forward and backward."""

    def step() -> None:
        model.zero_grad(set_to_none=True)
        model(*inputs).backward()

    return step


def peak_of(model: nn.Module, inputs: tuple[Tensor, ...], device: torch.device = CPU) -> int:
    """Return the peak in bytes of a step after a first one: parameters, buffers, inputs, activations, gradients and
    workspaces."""
    resident = sum(t.nbytes for t in (*model.parameters(), *model.buffers(), *inputs))
    step = stepper(model, inputs)
    step()
    model.zero_grad(set_to_none=True)
    gc.collect()
    return resident + peak_above_entry(step, device)[0]


def cpu_seconds() -> float:
    """Return the CPU seconds of this process and of ended children that it has waited for."""
    return sum(os.times()[:4])
