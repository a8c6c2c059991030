"""The update of weights by Kronecker factors: preconditioning, clipping, momentum, weight decay."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from rematplan.optim.layer import Layer, whole
from rematplan.optim.param_groups import Group

MOMENTUM = "momentum_buffer"


def preconditioned(
    layers: Mapping[str, Layer], gradients: Mapping[str, Tensor], group_of: Mapping[int, Group]
) -> tuple[dict[str, Tensor], Tensor]:
    """Return gradients (…, outputs, inputs) multiplied by inverses, by weight name, and Σ lr² ⟨update, gradient⟩. If a
    layer was never inverted, its update and the sum are NaN. ``group_of``: by the id of a parameter."""
    product = torch.zeros((), dtype=torch.float64, device=next(iter(layers.values())).weight.device)
    updates = {}
    for name, gradient in gradients.items():
        layer = layers[name]
        update = layer.precondition(gradient) if layer.inverted else torch.full_like(gradient, math.nan)
        product += float(group_of[id(layer.weight)]["lr"]) ** 2 * (update * gradient).sum()
        updates[name] = update
    return updates, product


def clipped(product: float, most: float | None) -> float:
    """Return min(1, √(``most`` ÷ ``product``)), which bounds a step's divergence in a quadratic model (Osawa et al.
    2019). ``most`` None: 1."""
    return 1.0 if most is None or product <= most else math.sqrt(most / product)


def move(
    updates: Iterable[tuple[Tensor, Tensor]],
    group_of: Mapping[int, Group],
    state: Mapping[Tensor, dict[str, Any]],
) -> None:
    """Subtract lr · update from parameters in place, with momentum as in `torch.optim.SGD` (in ``state``) and decoupled
    weight decay. ``group_of``: by the id of a parameter."""
    for parameter, update in updates:
        group = group_of[id(parameter)]
        lr, momentum = float(group["lr"]), group["momentum"]
        if group["weight_decay"]:
            parameter.mul_(1 - lr * group["weight_decay"])
        if momentum:
            held = state[parameter]
            if MOMENTUM in held:
                update = held[MOMENTUM].mul_(momentum).add_(update)
            else:
                held[MOMENTUM] = update = update.clone()
        parameter.add_(update, alpha=-lr)


def finite(product: Tensor, gradients: Sequence[Tensor]) -> bool:
    """Return whether ``product`` and the norms of all ``gradients`` are finite."""
    # Norms, so that one transfer from the device is enough.
    norms = [product, *(torch.linalg.vector_norm(whole(g)) for g in gradients)]
    return all(math.isfinite(norm) for norm in torch.stack([n.double() for n in norms]).tolist())
