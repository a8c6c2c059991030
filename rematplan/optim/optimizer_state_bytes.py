"""The size of an optimizer's state, known before the optimizer has made a step."""

from __future__ import annotations

from typing import Any

import torch
from torch.optim import Optimizer


def state_bytes(groups: list[dict[str, Any]], optimizer: Optimizer) -> int:
    """Return the bytes of the state that ``optimizer`` has for the parameters of ``groups`` after its first step.

    To measure them, a new optimizer of the same class makes one step on parameters of the device ``meta``, which take
    no memory. Tensors of its state on another device, such as step counters on the CPU, do not count.
    """
    twins = [
        {k: v for k, v in group.items() if k != "params"}
        | {"params": [torch.nn.Parameter(torch.empty_like(p, device="meta")) for p in group["params"]]}
        for group in groups
    ]
    kind: Any = type(optimizer)
    twin = kind(twins)
    for group in twins:
        for parameter in group["params"]:
            parameter.grad = torch.empty_like(parameter)
    twin.step()
    tensors = (t for held in twin.state.values() for t in held.values() if isinstance(t, torch.Tensor))
    return sum(t.numel() * t.element_size() for t in tensors if t.is_meta)
