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


def compiled(loop: Loop, *, fastmath: bool = False, nogil: bool = False) -> Loop:
    """As `kernel`. ``fastmath``: sums may be reordered. ``nogil``: other Python threads run meanwhile."""
    try:
        return cast(Loop, numba.njit(cache=True, fastmath=fastmath, nogil=nogil)(loop))
    except RuntimeError:  # numba found no folder for its cache
        return cast(Loop, numba.njit(fastmath=fastmath, nogil=nogil)(loop))
