"""Run a step of a pipeline's micro-batches in one process with plain PyTorch, to compare a pipeline's results with."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence

import torch
from torch import nn


def step_in_one_process(
    parameters: Iterable[nn.Parameter],
    loss_of: Callable[..., torch.Tensor],
    batch: Sequence[torch.Tensor],
    microbatches: int,
) -> list[float]:
    """Run forward and backward of each of ``microbatches`` equal parts of ``batch``, and return the losses. ``loss_of``
    gets a part's number and tensors. At the end, the gradients of ``parameters`` are divided by ``microbatches`` in
    place."""
    losses = []
    for number, parts in enumerate(zip(*(t.tensor_split(microbatches) for t in batch), strict=True)):
        loss = loss_of(number, *parts)
        loss.backward()
        losses.append(loss.item())
    for p in parameters:
        if p.grad is not None:
            p.grad.div_(microbatches)
    return losses
