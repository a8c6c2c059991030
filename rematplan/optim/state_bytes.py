"""The bytes that an optimizer's state will have, before it has any."""

from __future__ import annotations

from typing import Any

import torch
from torch.optim import Optimizer


def state_bytes(groups: list[dict[str, Any]], optimizer: Optimizer) -> int:
    """Bytes of the state that ``optimizer`` holds for the parameters of ``groups`` once it has made a step.

    A step of an optimizer of the same class on tensors without memory says it, whatever the class keeps.
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
