"""Merge the states of an optimizer that runs on several processes, to continue on another number of processes."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from typing import Any

from rematplan.ir import UsageError

LAYERS = "layers"
"""The key of the layers' state in a ``state_dict``."""


def merged(states: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """Merge the ``state_dict`` of each process into one that any number of processes can load.

    The factors of a layer come from the process that has them. All else is equal in all processes, or taken from the
    first.
    """
    whole = dict(states[0])
    whole[LAYERS] = {name: _of_owner(name, states) for name in states[0][LAYERS]}
    return whole


def _of_owner(name: str, states: Sequence[Mapping[str, Any]]) -> Any:
    found = [state[LAYERS][name] for state in states]
    return next((layer for layer in found if _has_factors(layer)), found[0])


def _has_factors(layer: Mapping[str, Any]) -> bool:
    return all(side["total"] is not None for side in layer.values())


def check_whole(state: Mapping[str, Any], owned: Collection[str]) -> None:
    """Check that a state has the factors of all layers that a process needs.

    ``owned``: the names of the layers whose factors this process averages and inverts.

    Raises:
        UsageError: a layer of ``owned`` had statistics when the state was saved, but the state lacks its factors.
    """
    layers = state[LAYERS]
    missing = [n for n in owned if n in state["met"] and n in layers and not _has_factors(layers[n])]
    if missing:
        raise UsageError(
            f"the state has no factors of {', '.join(missing[:5])}: it is the state of one of several processes; "
            f"load rematplan.optim.checkpoint.merged(states) instead"
        )
