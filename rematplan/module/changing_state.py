"""Refuse a forward that computes with Python state which it changes in each call: each call has another graph."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from functools import partial
from typing import Any

import torch
from torch import nn

from rematplan.ir import ModelError, NotCaptured
from rematplan.module.model_errors import eager_forwards
from rematplan.runtime.graph.compat import disable_current_modes
from rematplan.runtime.guards.guard import Guard
from rematplan.runtime.guards.module_state import ModuleState
from rematplan.runtime.guards.namespace import Namespace
from rematplan.runtime.guards.python_state import PythonState
from rematplan.runtime.guards.snapshots import UNSET, kept, same
from rematplan.runtime.guards.state_changes import Changes

_ABSENT = ("absent",)
STATE = "rematplan_state"
"""The name of the further argument of a forward that gets attributes with tensors: a dictionary of them by place."""
MOST_STATES = 8
"""The largest number of states that a forward may go through before it returns to one of them."""

Place = tuple[str, str]
"""The name of a submodule, and the path of attributes from it to a value."""


class MovingTensors(NotCaptured):
    """A forward that computes with tensors which are replaced between calls. ``places``: the attributes that have
    them."""

    def __init__(self, message: str, places: frozenset[Place]) -> None:
        super().__init__(message)
        self.places = places


def replaced_tensors(model: nn.Module, state: ModuleState, known: Iterable[Guard]) -> frozenset[Place]:
    """Return the attributes that have tensors now, and had others in earlier calls, at least two. (A single one may be
    that of the model of which this one is a copy.) ``known``: the guards of earlier calls; ``state``: the model's state
    now."""
    modules = [part for part, _ in model.named_modules()]
    others: dict[Place, set[int]] = {}
    for guard in known:
        for (at, path), attribute, then, now in guard.sequences_now(state):
            if _shapes(then) and _shapes(now):
                found = others.setdefault((modules[at], ".".join((*path, attribute))), set())
                found.add(0 if same(now, then) else id(then))
    return frozenset(place for place, found in others.items() if len(found) > 1 and 0 not in found)


def check_state_returns(
    name: str,
    model: nn.Module,
    state: PythonState,
    changes: Changes,
    forward: Callable[..., Any],
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
    again: Callable[[], object],
) -> None:
    """Refuse a forward that computes with state it changes, unless the state repeats, or a call fails, within
    `MOST_STATES` calls in eager mode. Raise `MovingTensors` if the forward only replaces tensors, else `ModelError`.
    State that is set once, like a table, passes if ``again`` can trace a second call. All state is restored."""
    place_of = partial(_place_of, state, [part for part, _ in model.named_modules()])
    read = sorted(one for one in changes.moving if place_of(*one) not in kwargs.get(STATE, ()))
    forwards = partial(eager_forwards, model, forward, args, kwargs)
    if not read:
        if changes.filled:
            _check_next_call(forwards, again, state)
        return
    seen, replaced = [_values(state, read)], set[tuple[int, str]]()
    try:
        for failed in forwards(MOST_STATES):
            now = _values(state, read)
            replaced = {one for one in read if _is_replaced(state.namespaces[one[0]], one[1])}
            if failed or any(all(map(same, now, before)) for before in seen):
                return
            seen.append(now)
    finally:
        state.restore()
    moving = [
        one for at, one in enumerate(read) if all(not same(values[at], seen[-1][at]) for values in seen[:-1])
    ]
    places = [place_of(*one) for one in moving or read]
    told = [*dict.fromkeys(".".join(place).lstrip(".") for place in places)]
    message = (
        f"{name}: its forward changes {', '.join(told[:3])}{', ...' * (len(told) > 3)} and computes with it, so "
        f"each call has another graph; make it a buffer (register_buffer), or change it outside the forward"
    )
    last = [[_shapes(values[read.index(one)]) for one in moving] for values in seen[-2:]]
    passed = bool(moving) and replaced.issuperset(moving) and None not in last[1] and last[0] == last[1]
    if all(value is _ABSENT for value in seen[0]):
        try:
            _check_next_call(forwards, again, state)
        except ModelError:
            if not passed:
                raise
        else:
            return
    if passed:
        raise MovingTensors(message, frozenset(places))
    raise ModelError(message)


def _check_next_call(
    forwards: Callable[[int], Iterable[object]], again: Callable[[], object], state: PythonState
) -> None:
    """Run one forward in eager mode, and let ``again`` trace the next one. The state is restored."""
    try:
        for _ in forwards(1):
            # One of these modes copies what ops write, but a trace writes into no memory.
            with disable_current_modes():
                again()
    finally:
        state.restore()


def _place_of(state: PythonState, modules: Sequence[str], at: int, name: str) -> Place:
    module, path = state.path_of(at, name)
    return "" if module is None else modules[module], path


def _is_replaced(namespace: Namespace, name: str) -> bool:
    """Return whether an attribute has another object than before the forward, of a holder whose accesses are
    recorded."""
    watched = namespace.owner is not None and not namespace.uses
    return watched and namespace.now(name) is not namespace.before.get(name, UNSET)


def _shapes(value: Any) -> Any:
    """Return the shapes and types in a tensor, or in a list or tuple of tensors and of such lists and tuples; None for
    other values."""
    if isinstance(value, (list, tuple)):
        parts = [_shapes(one) for one in value]
        return (type(value), *parts) if parts and None not in parts else None
    return (value.shape, value.dtype) if isinstance(value, torch.Tensor) else None


def _values(state: PythonState, names: list[tuple[int, str]]) -> list[Any]:
    now = (state.namespaces[at].now(name) for at, name in names)
    return [_ABSENT if value is UNSET else kept(value) for value in now]
