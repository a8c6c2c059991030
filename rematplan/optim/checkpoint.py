"""State of an optimizer on several processes, for a run on another number of them."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from typing import Any

from rematplan.ir import UsageError

LAYERS = "layers"
"""The key of the factors' state."""


def merged(states: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """One state from the ``state_dict`` of each process, for any number of processes.

    Each layer's factors are those of its owner; what all processes hold is the first one's.
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
    """Refuse a state that lacks factors which the run had.

    Raises:
        UsageError: a layer of ``owned`` has had statistics, and its factors are not there.
    """
    layers = state[LAYERS]
    missing = [n for n in owned if n in state["met"] and n in layers and not _has_factors(layers[n])]
    if missing:
        raise UsageError(
            f"the state has no factors of {', '.join(missing[:5])}: it is that of one of several processes; load "
            f"rematplan.optim.checkpoint.merged(states)"
        )
