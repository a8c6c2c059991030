"""The update of the weights by an optimizer with Kronecker factors: preconditioning, clipping, momentum, weight
decay."""

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
    """Multiply the gradients of layers by the inverses of their Kronecker factors, and return the products as updates.

    Args:
        layers: the layers, by weight name.
        gradients: matrices (…, outputs, inputs), by weight name. Each name is in ``layers``.
        group_of: the param group (with its learning rate ``lr``) of each parameter, by the parameter's ``id``.

    Returns:
        The updates by weight name, with the gradients' shapes; and the sum of lr² ⟨update, gradient⟩ over the layers,
        as a scalar tensor. If the factors of a layer were not inverted yet, its update and the sum are NaN.
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
    """Return the factor, at most 1, by which updates are multiplied to limit the size of a step (Osawa et al. 2019).

    The divergence between the model's outputs before and after the step, estimated by a quadratic model, is then at
    most ``most``. The factor is min(1, √(``most`` ÷ ``product``)).

    Args:
        product: Σ lr² ⟨update, gradient⟩ over all layers.
        most: the limit; None: the factor is 1.
    """
    return 1.0 if most is None or product <= most else math.sqrt(most / product)


def move(
    updates: Iterable[tuple[Tensor, Tensor]],
    group_of: Mapping[int, Group],
    state: Mapping[Tensor, dict[str, Any]],
) -> None:
    """Subtract lr · update from parameters in place, with momentum as in `torch.optim.SGD`.

    Before that, weight decay multiplies each parameter by 1 − lr · weight_decay. Unlike in `torch.optim.SGD`, it does
    not enter the momentum.

    Args:
        updates: pairs of a parameter and its update.
        group_of: the param group of each parameter (``lr``, ``momentum``, ``weight_decay``), by the parameter's ``id``.
        state: the optimizer's state by parameter. The momentum buffer is stored in it.
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
    """Return whether ``product`` and the norms of all ``gradients`` are finite.

    Norms are tested instead of elements, so that a single transfer from the device to the host is enough.
    """
    norms = [product, *(torch.linalg.vector_norm(whole(g)) for g in gradients)]
    return all(math.isfinite(norm) for norm in torch.stack([n.double() for n in norms]).tolist())
