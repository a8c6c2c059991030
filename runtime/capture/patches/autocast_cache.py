"""Make a trace cast each weight only once under autocast, as eager mode does, so that its gradients are summed in
lower precision.

Autocast's cache works for leaf tensors only, which a tracer's are not.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from threading import get_ident
from typing import Any
from unittest.mock import patch

import torch

from rematplan.runtime.capture.patches.eager_kernels import with_kernels
from rematplan.runtime.graph.compat import DispatchKey, is_dispatch_key_excluded

TO_COPY = torch.ops.aten._to_copy.default
AUTOCAST_KEYS = {"cpu": DispatchKey.AutocastCPU, "cuda": DispatchKey.AutocastCUDA}


@contextmanager
def casting_once(leaves: Sequence[torch.Tensor], enabled: bool) -> Iterator[None]:
    """Inside the block, let each outermost use of autocast cast a trained float32 tensor in ``leaves`` once, as in
    eager mode. ``enabled``: whether autocast's cache is enabled; otherwise each op casts."""
    known = {id(t) for t in leaves if t.requires_grad and t.dtype == torch.float32}
    cast: dict[int, torch.Tensor] = {}
    switched_on = {device: torch.is_autocast_enabled(device) for device in AUTOCAST_KEYS}
    thread = get_ident()  # all threads see the replaced functions and kernels
    switch, clear = torch.set_autocast_enabled, torch.clear_autocast_cache

    def note(device: str, on: bool) -> None:
        if get_ident() == thread:
            switched_on[device] = on
        switch(device, on)

    def left() -> None:
        if get_ident() == thread:
            cast.clear()
        else:
            clear()

    def by_autocast(device: str, dtype: torch.dtype | None) -> bool:
        # While autocast casts, its dispatch key is excluded, as it is where autocast is off.
        if not switched_on.get(device) or not is_dispatch_key_excluded(AUTOCAST_KEYS[device]):
            return False
        return torch.is_autocast_cache_enabled() and dtype == torch.get_autocast_dtype(device)

    def to_copy(x: torch.Tensor, **kwargs: Any) -> torch.Tensor:
        """Cast a tensor. In this thread, what autocast casts of the known tensors is cast once, and returned again
        afterwards."""
        shared = get_ident() == thread and id(x) in known and by_autocast(x.device.type, kwargs.get("dtype"))
        if shared and id(x) in cast:
            return cast[id(x)]
        with with_kernels({(TO_COPY, DispatchKey.Autograd): None}):
            result: torch.Tensor = TO_COPY(x, **kwargs)
        if shared:
            cast[id(x)] = result
        return result

    before = torch.is_autocast_cache_enabled()
    torch.set_autocast_cache_enabled(enabled)
    try:
        with (
            with_kernels({(TO_COPY, DispatchKey.Autograd): to_copy}),
            patch.object(torch, "set_autocast_enabled", note),
            # Called when the outermost autocast block ends.
            patch.object(torch, "clear_autocast_cache", left),
        ):
            yield
    finally:
        torch.set_autocast_cache_enabled(before)
