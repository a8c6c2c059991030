"""Replay of random states: if a random op runs again, it must draw the same numbers, as for recomputed dropout."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from functools import partial
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
    """Return, by names in generated source, functions that save, load and set apart a generator's state."""
    return {
        f"save_rng_{device.type}": save_rng(device),
        f"load_rng_{device.type}": load_rng(device),
        f"apart_rng_{device.type}": partial(_apart, device),
    }


def _apart(device: torch.device, state: torch.Tensor) -> torch.Generator:
    """Return a generator with a state, in memory that no allocator of tensors counts."""
    return torch.Generator(device).set_state(state)


def first_draw(assign: str, state: str, device: torch.device) -> list[str]:
    """Return lines of source that save the generator's state, and then run a random op for the first time."""
    return [f"{state} = save_rng_{device.type}()", assign]


def later_draw(assign: str, state: str, device: torch.device, last: bool) -> list[str]:
    """Return source lines that execute ``assign``, a random op's assignment, again from the generator state in the
    variable ``state``, then restore the generator. ``last``: whether no execution follows, so that the variable is
    deleted."""
    save, load, apart = (f"{what}_rng_{device.type}" for what in ("save", "load", "apart"))
    # While the op runs, the states are in generators, so that the op needs no more memory than at its first run.
    keep, again = (
        ([], []) if last else ([f"rng_first = {apart}({state})"], [f"{state} = rng_first.get_state()"])
    )
    return [
        *keep,
        f"rng_now = {apart}({save}())",
        f"{load}({state})",
        f"del {state}",
        assign,
        f"{load}(rng_now.get_state())",
        *again,
        f"del rng_now{'' if last else ', rng_first'}",
    ]
