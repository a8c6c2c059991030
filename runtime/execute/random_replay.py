"""Replay of random state: a random op that runs again draws the same numbers, as recomputed dropout must."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from typing import Any

import torch

from rematplan.planner.core.schedule import Schedule, runs_of
from rematplan.runtime.graph.captured_step import CapturedStep

Generator = Callable[[], Any]


def replayed_ops(step: CapturedStep, schedule: Schedule) -> set[str]:
    """Return the names of the random ops that a schedule runs more than once."""
    count = Counter(runs_of(schedule))
    return {call.name for call in step.calls if call.seeded and count[call.name] > 1}


def save_rng(device: torch.device) -> Generator:
    """Return a function without arguments that returns the state of the device's default random number generator."""
    if device.type == "cuda":
        return lambda: torch.cuda.get_rng_state(device)
    return torch.get_rng_state


def load_rng(device: torch.device) -> Callable[[Any], None]:
    """Return a function that sets the device's default random number generator to the state that it is called with."""
    if device.type == "cuda":
        return lambda state: torch.cuda.set_rng_state(state, device)
    return torch.set_rng_state


def replay_functions(device: torch.device) -> dict[str, Callable[..., Any]]:
    """Return the functions that save and load the state of a device's random number generator, by the names under
    which the source from `first_draw` and `later_draw` calls them."""
    return {f"save_rng_{device.type}": save_rng(device), f"load_rng_{device.type}": load_rng(device)}


def first_draw(assign: str, state: str, device: torch.device) -> list[str]:
    """Return the lines of source that run a random op for the first time and keep the generator's state from before
    it.

    Args:
        assign: the line that runs the op.
        state: the variable for the generator's state.
        device: the device of the generator.
    """
    return [f"{state} = save_rng_{device.type}()", assign]


def later_draw(assign: str, state: str, device: torch.device) -> list[str]:
    """Return the lines of source that run a random op again with the generator's state of its first run, and then
    restore the generator's present state.

    Args:
        assign: the line that runs the op.
        state: the variable that contains the state of the first run.
        device: the device of the generator.
    """
    save, load = f"save_rng_{device.type}", f"load_rng_{device.type}"
    return [f"rng_now = {save}()", f"{load}({state})", assign, f"{load}(rng_now)", "del rng_now"]
