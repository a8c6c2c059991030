"""The peak of a training step with its optimizer, as it is measured."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import nn

from rematplan.runtime.costs.measure import bytes_of, peak_above_entry
from rematplan.runtime.graph.tensor_storages import plain_tensors


def training_peak(model: nn.Module, inputs: Sequence[torch.Tensor], optimizer: torch.optim.Optimizer) -> int:
    """Run two training steps on the CPU, which change ``model`` and ``optimizer``. Return the second one's peak bytes,
    with parameters, buffers, inputs and state included. The model's output is the loss."""

    def step() -> None:
        model(*inputs).backward()
        optimizer.step()
        optimizer.zero_grad()

    step()
    states = [t for of in optimizer.state.values() for t in plain_tensors(of)]
    held = bytes_of([*model.parameters(), *model.buffers(), *inputs, *states])
    return held + peak_above_entry(step, torch.device("cpu"))[0]
