"""Tensors in attributes that are replaced between calls, such as a recurrent network's hidden state, or a table that
is made anew for another length: planned calls get them as further arguments."""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import partial
from typing import Any

from torch import nn

from rematplan.module.changing_state import STATE, Place
from rematplan.module.forward_capture import Original
from rematplan.runtime.guards.snapshots import UNSET


@dataclass(frozen=True)
class StateTensors:
    """The attributes with tensors that are replaced between calls."""

    places: frozenset[Place] = frozenset()

    def among_arguments(
        self, original: Original, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> tuple[Original, tuple[Any, ...], dict[str, Any]]:
        """Return a call in which the state is a further argument. The forward of the call sets the attributes before
        anything else. Without `places`, the call is unchanged."""
        if not self.places:
            return original, args, kwargs
        state = {place: _found(original.model, *place) for place in sorted(self.places)}
        return replace(original, forward=partial(_with_state, original)), args, {**kwargs, STATE: state}


def _with_state(original: Original, *args: Any, **kwargs: Any) -> Any:
    for place, value in kwargs.pop(STATE).items():
        if value is not UNSET:
            holder, name = _at(original.model, *place)
            setattr(holder, name, value)
    return original.forward(*args, **kwargs)


def _found(model: nn.Module, module: str, path: str) -> Any:
    try:
        holder, name = _at(model, module, path)
    except AttributeError:  # the caller has removed a submodule
        return UNSET
    return vars(holder).get(name, UNSET)


def _at(model: nn.Module, module: str, path: str) -> tuple[Any, str]:
    holder: Any = model.get_submodule(module)
    *parts, name = path.split(".")
    for part in parts:
        holder = getattr(holder, part)
    return holder, name
