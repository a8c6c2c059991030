"""Modules with shapes but without data, so that a step of any size can be captured without allocating it."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from typing import Any

import torch
from torch import nn
from torch.overrides import TorchFunctionMode

from rematplan.ir import ModelError
from rematplan.runtime.capture.capture import check_traceable, compiled_modules
from rematplan.runtime.graph.compat import FakeTensor, FakeTensorMode

CPU = torch.device("cpu")
DRAWS = frozenset(
    (nn.init.kaiming_uniform_, nn.init.normal_, nn.init.uniform_, torch.Tensor.normal_, torch.Tensor.uniform_)
)


@contextmanager
def shapes_only() -> Iterator[None]:
    """Create modules on the meta device in the block, without drawing initial weights, which would take long."""
    with torch.device("meta"), _Undrawn():
        yield


class _Undrawn(TorchFunctionMode):
    def __torch_function__(
        self, func: Any, types: Any, args: Sequence[Any] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        options = kwargs or {}
        if func in DRAWS:
            return options["tensor"] if "tensor" in options else args[0]
        return func(*args, **options)


def without_data(
    make: Callable[[], nn.Module], inputs: Callable[[], Sequence[torch.Tensor]], device: torch.device = CPU
) -> tuple[nn.Module, tuple[torch.Tensor, ...], FakeTensorMode]:
    """Return the module that ``make`` creates and the batch that ``inputs`` creates, both with fake tensors (shapes and
    types without memory) on ``device``, and their fake mode. Raises `ModelError` for a module that cannot be traced
    (`check_traceable`), and for compiled modules."""
    mode = FakeTensorMode()
    with shapes_only():
        module = make()
    check_traceable(module)
    if compiled := compiled_modules(module):
        raise ModelError(
            f"{compiled[0]} is compiled, so it needs data; return the model before torch.compile"
        )
    empty(module, mode, device)
    with mode:
        return module, tuple(x.to(device) for x in inputs()), mode


def empty(
    module: nn.Module,
    mode: AbstractContextManager[object],
    device: torch.device = CPU,
    dtype: torch.dtype | None = None,
) -> None:
    """Replace a module's parameters and buffers, in place, by fake tensors like them on ``device``, floating-point ones
    of type ``dtype`` if given. Tied tensors stay tied."""
    made: dict[torch.Tensor, torch.Tensor] = {}  # tensors are equal as keys only if they are the same
    for part in module.modules():
        for table in (part._parameters, part._buffers):
            for name, t in table.items():
                if t is not None and t not in made:
                    made[t] = _empty(t, mode, device, dtype)
                if t is not None:
                    table[name] = made[t]  # type: ignore[assignment]


def _empty(
    t: torch.Tensor, mode: AbstractContextManager[object], device: torch.device, dtype: torch.dtype | None
) -> torch.Tensor:
    kept = dtype is None or not t.is_floating_point()
    with mode:
        fake = torch.empty_strided(t.shape, t.stride(), dtype=t.dtype if kept else dtype, device=device)
    return nn.Parameter(fake, requires_grad=t.requires_grad) if isinstance(t, nn.Parameter) else fake


def is_weightless(tensors: Sequence[torch.Tensor]) -> bool:
    """Return whether any of the tensors is a fake, which has a shape but no data."""
    return any(isinstance(t, FakeTensor) for t in tensors)
