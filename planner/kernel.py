"""Compile a hot loop with numba, keeping its type."""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeVar, cast

import numba

Loop = TypeVar("Loop", bound=Callable[..., object])


def kernel(loop: Loop) -> Loop:
    """``loop`` compiled at its first call for each set of argument types; the machine code is cached on
    disk."""
    return cast(Loop, numba.njit(cache=True)(loop))
