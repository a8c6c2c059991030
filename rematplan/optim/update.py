"""The update of the weights: preconditioned gradients, clipping, momentum and weight decay."""

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
    """Multiply the gradients of layers by the inverses of their Kronecker factors.

    Args:
        layers: the layers, by weight name.
        gradients: matrices (…, outputs, inputs), by weight name.
        group_of: the param group of each parameter, by the parameter's ``id``.

    Returns:
        The updates by weight name, with the gradients' shapes; and Σ lr² ⟨update, gradient⟩ over these layers. The
        update of a layer without inverses is NaN, and so is the sum.
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
    """Return the factor for updates that bounds a step's divergence in the quadratic model (Osawa et al. 2019) by
    ``most``.

    The factor is min(1, √(``most`` ÷ ``product``)), and 1 if ``most`` is None. ``product``: Σ lr² ⟨update, gradient⟩.
    """
    return 1.0 if most is None or product <= most else math.sqrt(most / product)


def move(
    updates: Iterable[tuple[Tensor, Tensor]],
    group_of: Mapping[int, Group],
    state: Mapping[Tensor, dict[str, Any]],
) -> None:
    """Update parameters in place: weight decay first, then subtract lr · update, with momentum as in `torch.optim.SGD`.

    Args:
        updates: pairs of a parameter and its update.
        group_of: the param group of each parameter, by the parameter's ``id``.
        state: the optimizer's state by parameter; the momentum buffer is kept in it.
    """
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
    """Return whether ``product`` and all gradients are finite. One transfer to the host suffices, because norms are
    tested."""
    norms = [product, *(torch.linalg.vector_norm(whole(g)) for g in gradients)]
    return all(math.isfinite(norm) for norm in torch.stack([n.double() for n in norms]).tolist())
