"""Compile a hot loop with numba, keeping its type."""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeVar, cast

import numba

Loop = TypeVar("Loop", bound=Callable[..., object])


def kernel(loop: Loop) -> Loop:
    """``loop`` compiled at its first call for each set of argument types; the machine code is cached on disk.

    Where neither the package's folder nor the user's can be written, it is compiled in each process.
    """
    return compiled(loop)


def compiled(loop: Loop, **options: bool) -> Loop:
    """As `kernel`, with options of ``numba.njit``."""
    try:
        return cast(Loop, numba.njit(cache=True, **options)(loop))
    except RuntimeError:  # numba found no folder for its cache
        return cast(Loop, numba.njit(**options)(loop))
