"""Refuse a forward that computes with Python state which it changes in each call: each call has another graph."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch import nn

from rematplan.ir import ModelError
from rematplan.module.model_errors import eager_forwards
from rematplan.runtime.graph.compat import disable_current_modes
from rematplan.runtime.guards.python_state import PythonState
from rematplan.runtime.guards.snapshots import UNSET, kept, same

_ABSENT = ("absent",)
MOST_STATES = 8
"""The largest number of states that a forward may go through before it returns to one of them."""


def check_state_returns(
    name: str,
    model: nn.Module,
    state: PythonState,
    forward: Callable[..., Any],
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
    again: Callable[[], object],
) -> None:
    """Refuse, by `ModelError`, a forward that computes with state it changes, unless the state repeats within
    `MOST_STATES` calls. State that is set once, like a table, passes if ``again`` can trace a second call. The forward
    runs in eager mode to find out; all state is restored."""
    read = sorted(state.moving)

    def check_next_call() -> None:
        try:
            for _ in eager_forwards(model, forward, args, kwargs, 1):
                # One of these modes copies what ops write, but a trace writes into no memory.
                with disable_current_modes():
                    again()
        finally:
            state.restore()

    if not read:
        if state.filled:
            check_next_call()
        return
    seen = [_values(state, read)]
    try:
        for failed in eager_forwards(model, forward, args, kwargs, MOST_STATES):
            now = _values(state, read)
            if failed or any(all(map(same, now, before)) for before in seen):
                return
            seen.append(now)
    finally:
        state.restore()
    if all(value is _ABSENT for value in seen[0]):
        check_next_call()
        return
    moving = [
        one for at, one in enumerate(read) if all(not same(values[at], seen[-1][at]) for values in seen[:-1])
    ]
    names = [state.path_of(at, key) for at, key in moving or read]
    parts = [part for part, _ in model.named_modules()]
    told = dict.fromkeys(f"{parts[at]}.{path}".lstrip(".") if at is not None else path for at, path in names)
    raise ModelError(
        f"{name}: its forward changes {', '.join(list(told)[:3])}{', ...' * (len(told) > 3)} and computes with it, so "
        f"each call has another graph; make it a buffer (register_buffer), or change it outside the forward"
    )


def _values(state: PythonState, names: list[tuple[int, str]]) -> list[Any]:
    now = (state.namespaces[at].now(name) for at, name in names)
    return [_ABSENT if value is UNSET else kept(value) for value in now]
