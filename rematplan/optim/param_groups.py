"""Split param groups into parameters that have Kronecker factors and parameters that need another optimizer."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any, TypeAlias

from torch import nn

from rematplan.ir import UsageError
from rematplan.optim.layer import Layer

Group: TypeAlias = dict[str, Any]

OTHERS = "others"
"""Key in a param group: a dictionary of options for the group's parameters without factors."""


def split_groups(
    model: nn.Module, layers: Mapping[str, Layer], params: Iterable[Group] | None
) -> tuple[dict[str, Layer], list[Group], list[Group]]:
    """Split param groups into those of layers with Kronecker factors, and those of all other trained parameters.

    Args:
        model: the model whose parameters are optimized.
        layers: all layers with Kronecker factors, by weight name.
        params: param groups; None stands for one group of all parameters of the model.

    Returns:
        Three results. The first contains the layers whose weights are in ``params``, by weight name. The second
        contains the param groups of these layers' parameters. The third contains the param groups of the other trained
        parameters; the options of a group are those that the original group has under its key ``others``.

    Raises:
        UsageError: a group is no dictionary with ``params``, or no weight has Kronecker factors.
    """
    groups: list[Group] = (
        [{"params": list(model.parameters())}] if params is None else [_group(g) for g in params]
    )
    given = {id(p) for group in groups for p in group["params"]}
    chosen = {name: layer for name, layer in layers.items() if id(layer.weight) in given}
    if not chosen:
        raise UsageError("no weight has Kronecker factors: use another optimizer")
    mine = {id(p) for layer in chosen.values() for p in layer.parameters}
    ours, theirs = [], []
    for group in groups:
        trained = [p for p in group["params"] if p.requires_grad]
        here = [p for p in trained if id(p) in mine]
        rest = [p for p in trained if id(p) not in mine]
        if here:
            ours.append({k: v for k, v in group.items() if k != OTHERS} | {"params": here})
        if rest:
            theirs.append(dict(group.get(OTHERS, {})) | {"params": rest})
    return chosen, ours, theirs


def _group(group: Group) -> Group:
    if not isinstance(group, dict) or "params" not in group:
        raise UsageError('params must be a list of dictionaries; write [{"params": model.parameters()}]')
    return group | {"params": list(group["params"])}
