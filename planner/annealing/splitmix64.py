"""Random numbers for compiled loops, by the generator splitmix64. Its state is an integer in an array."""

from __future__ import annotations

import numpy as np

from rematplan.planner.caches.numba_kernels import inner
from rematplan.planner.core.array_types import Words

STEP = np.uint64(0x9E3779B97F4A7C15)
MIX_1 = np.uint64(0xBF58476D1CE4E5B9)
MIX_2 = np.uint64(0x94D049BB133111EB)
S27, S30, S31, S11 = np.uint64(27), np.uint64(30), np.uint64(31), np.uint64(11)


@inner
def uniform(random: Words) -> float:
    """Return a random number, uniform in [0, 1). ``random``: an array whose first element is the generator's state; the
    state is advanced."""
    random[0] += STEP
    z = random[0]
    z = (z ^ (z >> S30)) * MIX_1
    z = (z ^ (z >> S27)) * MIX_2
    z = z ^ (z >> S31)
    return float(z >> S11) * 1.1102230246251565e-16


@inner
def below(random: Words, n: int) -> int:
    """Return a random integer, uniform in 0 .. n - 1. ``random``: an array whose first element is the generator's
    state; the state is advanced."""
    return int(uniform(random) * n)
