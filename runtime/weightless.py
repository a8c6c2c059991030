"""Modules that have shapes and no data, so that a step of any size is captured in no memory."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import nn
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode

CPU = torch.device("cpu")


def without_data(
    make: Callable[[], nn.Module], inputs: Callable[[], Sequence[torch.Tensor]], device: torch.device = CPU
) -> tuple[nn.Module, tuple[torch.Tensor, ...], FakeTensorMode]:
    """A module whose parameters and buffers are fakes on ``device``, a batch of fakes, and the mode they live in.

    ``make`` runs on the meta device, ``inputs`` in the mode, so that neither allocates.
    """
    mode = FakeTensorMode()
    with torch.device("meta"):
        module = make()
    empty(module, mode, device)
    with mode:
        return module, tuple(x.to(device) for x in inputs()), mode


def empty(module: nn.Module, mode: FakeTensorMode, device: torch.device = CPU) -> None:
    """Put a fake on ``device``, of the same layout, in place of each parameter and buffer; tied ones stay tied."""
    made: dict[torch.Tensor, torch.Tensor] = {}  # tensors are equal as keys only if they are the same
    for part in module.modules():
        for table in (part._parameters, part._buffers):
            for name, t in table.items():
                if t is not None and t not in made:
                    made[t] = _empty(t, mode, device)
                if t is not None:
                    table[name] = made[t]  # type: ignore[assignment]


def _empty(t: torch.Tensor, mode: FakeTensorMode, device: torch.device) -> torch.Tensor:
    with mode:
        fake = torch.empty_strided(t.shape, t.stride(), dtype=t.dtype, device=device)
    return nn.Parameter(fake, requires_grad=t.requires_grad) if isinstance(t, nn.Parameter) else fake


def is_weightless(tensors: Sequence[torch.Tensor]) -> bool:
    """Whether any of the tensors is a fake."""
    return any(isinstance(t, FakeTensor) for t in tensors)
