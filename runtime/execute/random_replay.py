"""Replay of random states: if a random op runs again, it must draw the same numbers, as for recomputed dropout."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from typing import Any

import torch

from rematplan.planner.core.schedule import Schedule, runs_of
from rematplan.runtime.graph.captured_step import CapturedStep
from rematplan.runtime.graph.generator_states import load_rng, save_rng


def replayed_ops(step: CapturedStep, schedule: Schedule) -> set[str]:
    """Return the names of the random ops that a schedule runs more than once."""
    count = Counter(runs_of(schedule))
    return {call.name for call in step.calls if call.seeded and count[call.name] > 1}


def replay_functions(device: torch.device) -> dict[str, Callable[..., Any]]:
    """Return two functions that save and load the state of a device's random number generator. The keys are the names
    by which the source from `first_draw` and `later_draw` calls them."""
    return {f"save_rng_{device.type}": save_rng(device), f"load_rng_{device.type}": load_rng(device)}


def first_draw(assign: str, state: str, device: torch.device) -> list[str]:
    """Return lines of source that save the generator's state, and then run a random op for the first time."""
    return [f"{state} = save_rng_{device.type}()", assign]


def later_draw(assign: str, state: str, device: torch.device) -> list[str]:
    """Return lines of source that run a random op again, from the generator's state before its first execution.
    Afterwards they set the generator back to the state in which they found it.
    """
    save, load = f"save_rng_{device.type}", f"load_rng_{device.type}"
    return [f"rng_now = {save}()", f"{load}({state})", assign, f"{load}(rng_now)", "del rng_now"]
