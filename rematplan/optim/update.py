"""From gradients to moved weights: the preconditioned gradient, its clipping, momentum and decay."""

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
    """The update of each layer that has a gradient, and Σ lr² ⟨update, gradient⟩; NaN where an inverse is missing.

    ``group_of``: the param group by the parameter's id.
    """
    product = torch.zeros((), dtype=torch.float64, device=next(iter(layers.values())).weight.device)
    updates = {}
    for name, gradient in gradients.items():
        layer = layers[name]
        update = layer.precondition(gradient) if layer.inverted else torch.full_like(gradient, math.nan)
        product += float(group_of[id(layer.weight)]["lr"]) ** 2 * (update * gradient).sum()
        updates[name] = update
    return updates, product


def clipped(product: float, most: float | None) -> float:
    """By what updates are multiplied, so that the divergence of a step is at most ``most`` in the quadratic model."""
    return 1.0 if most is None or product <= most else math.sqrt(most / product)


def move(
    updates: Iterable[tuple[Tensor, Tensor]],
    group_of: Mapping[int, Group],
    state: Mapping[Tensor, dict[str, Any]],
) -> None:
    """Decay parameters and move each against its update, with the momentum that ``state`` holds."""
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
    """Whether a number and all gradients are finite."""
    norms = [product, *(torch.linalg.vector_norm(whole(g)) for g in gradients)]
    return all(math.isfinite(norm) for norm in torch.stack([n.double() for n in norms]).tolist())
