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
    """Return the layers whose weights are in ``params``, the param groups of their parameters, and those of other
    trained parameters. The last have a group's options under ``others``. UsageError if no weight has factors."""
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
