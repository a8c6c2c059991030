"""What a graph cannot reproduce: Python's and NumPy's generators, and PyTorch's functions that seed one."""

from __future__ import annotations

import random
from types import ModuleType

import numpy as np
import torch

GENERATORS = (random.Random, np.random.RandomState, np.random.Generator)
_DEVICES = ("cuda", "xpu", "mtia", "mps")
_SEEDING = (
    *("manual_seed", "manual_seed_all", "seed", "seed_all", "initial_seed"),
    *("set_rng_state", "set_rng_state_all"),
)


def seeding_functions() -> tuple[tuple[ModuleType, str], ...]:
    """Return, as (module, name), all functions of PyTorch that seed a generator, set its state or return its seed,
    for any device."""
    parts = (torch, *(getattr(torch, name) for name in _DEVICES if hasattr(torch, name)))
    inner = (getattr(part, "random", None) for part in parts)
    owners = (*parts, *(part for part in inner if isinstance(part, ModuleType)))
    return tuple((owner, name) for owner in owners for name in _SEEDING if hasattr(owner, name))
