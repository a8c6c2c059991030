"""Modules that have shapes and no data, so that a step of any size is captured in no memory."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn
from torch.overrides import TorchFunctionMode

from rematplan.runtime.graph.compat import FakeTensor, FakeTensorMode

CPU = torch.device("cpu")
DRAWS = frozenset(
    (nn.init.kaiming_uniform_, nn.init.normal_, nn.init.uniform_, torch.Tensor.normal_, torch.Tensor.uniform_)
)


@contextmanager
def shapes_only() -> Iterator[None]:
    """Modules made within are on the meta device, and nothing is drawn for their weights: where there are no numbers,
    drawing them is all the same most of the time that a module takes to make."""
    with torch.device("meta"), _Undrawn():
        yield


class _Undrawn(TorchFunctionMode):
    def __torch_function__(
        self, func: Any, types: Any, args: Sequence[Any] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        given = kwargs or {}
        if func in DRAWS:
            return given["tensor"] if "tensor" in given else args[0]
        return func(*args, **given)


def without_data(
    make: Callable[[], nn.Module], inputs: Callable[[], Sequence[torch.Tensor]], device: torch.device = CPU
) -> tuple[nn.Module, tuple[torch.Tensor, ...], FakeTensorMode]:
    """A module whose parameters and buffers are fakes on ``device``, a batch of fakes, and the mode they live in.

    ``make`` runs in `shapes_only`, ``inputs`` in the mode, so that neither allocates.
    """
    mode = FakeTensorMode()
    with shapes_only():
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
