"""Merge the states of a K-FAC optimizer on several processes, to continue on another number of processes."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from typing import Any

from rematplan.ir import UsageError
from rematplan.optim.assignment import FactorKey

LAYERS = "layers"
"""The key of the layers' state in a ``state_dict``."""
SIDES = ("a", "g")
"""The keys of the two factors in a layer's state."""


def merged(states: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """Merge the ``state_dict`` of all processes into one that any number of processes can load.

    The state of each Kronecker factor comes from the process that has the factor's average. All other entries come from
    the first process, since they are equal in all processes.

    ``states``: the states of all processes, in the order of their ranks.
    """
    whole = dict(states[0])
    whole[LAYERS] = {name: _of_owner(name, states) for name in states[0][LAYERS]}
    return whole


def _of_owner(name: str, states: Sequence[Mapping[str, Any]]) -> Any:
    found = [state[LAYERS][name] for state in states]
    return {
        side: next((one[side] for one in found if one[side]["total"] is not None), found[0][side])
        for side in SIDES
    }


def check_whole(state: Mapping[str, Any], owned: Collection[FactorKey]) -> None:
    """Raise a UsageError if a ``state_dict`` lacks the average of a factor that had statistics and is in ``owned``, the
    factors that this process inverts."""
    layers = state[LAYERS]
    missing = [
        name
        for name, at in owned
        if name in state["met"] and name in layers and layers[name][SIDES[at]]["total"] is None
    ]
    if missing:
        raise UsageError(
            f"the state has no factors of {', '.join(dict.fromkeys(missing[:5]))}: it is the state of one of several "
            f"processes; load rematplan.optim.checkpoint.merged(states) instead"
        )
