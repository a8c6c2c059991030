"""Compile a hot loop with numba, keeping its type."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache, partial
from hashlib import sha256
from pathlib import Path
from typing import Any, TypeVar, cast

import numba
from numba.core.options import DefaultOptions

UNCOUNTED = {"_nrt": False} if hasattr(DefaultOptions, "_nrt") else {}
"""numba's option for loops that count no references; it works without, only slower."""

Loop = TypeVar("Loop", bound=Callable[..., object])


def kernel(loop: Loop) -> Loop:
    """``loop`` compiled at its first call for each set of argument types; the machine code is cached on disk.

    Where neither the package's folder nor the user's can be written, it is compiled in each process.
    """
    return compiled(loop)


def inner(loop: Loop) -> Loop:
    """As `borrowing`, for loops that only other kernels call: compiled without an entry from Python, which takes
    longer to compile than a short loop itself."""
    return borrowing(loop, no_cpython_wrapper=True, no_cfunc_wrapper=True)


def borrowing(loop: Loop, **options: bool) -> Loop:
    """As `compiled`, for loops that neither make nor return arrays: they do not count references to those that they
    are given. Counting takes atomic steps for each array at each call: more than half of the annealer's time."""
    return compiled(loop, **UNCOUNTED, **options)


def compiled(loop: Loop, **options: bool) -> Loop:
    """As `kernel`, with options of numba's: ``fastmath``, sums may be reordered; ``nogil``, other Python threads
    run meanwhile."""
    compiler = cast(Any, numba.njit)  # its types know only some of its options
    try:
        made = compiler(cache=True, **options)(loop)
    except RuntimeError:  # numba found no folder for its cache
        return cast(Loop, compiler(**options)(loop))
    _stamp(made)
    _widen(made)
    return cast(Loop, made)


@cache
def _sources() -> str:
    """A digest of the planner's files with kernels: those that import this module."""
    marker = b"numba_kernels import"
    texts = [path.read_bytes() for path in sorted(Path(__file__).parents[1].rglob("*.py"))]
    return sha256(b"".join(text for text in texts if marker in text)).hexdigest()


def _stamp(made: object) -> None:
    """Make cached machine code stale when any of the planner's files with kernels has changed.

    numba looks at the kernel's own file only, but the code holds that of the kernels which it calls. Where numba
    keeps its stamp elsewhere some day, its own rule stands.
    """
    file: Any = getattr(getattr(made, "_cache", None), "_cache_file", None)
    if hasattr(file, "_source_stamp"):
        file._source_stamp = _sources()
    if hasattr(file, "_load_index"):
        file._load_index = partial(_readable, file._load_index)


def _readable(load: Callable[[], dict[Any, Any]]) -> dict[Any, Any]:
    """An index of cached machine code; empty where it names a type that has been renamed or moved since, which numba
    would raise for before it compares the stamps."""
    try:
        return load()
    except (AttributeError, ImportError):
        return {}


def _widen(made: Any) -> None:
    """Have a call with a constant take the code for any number: numba would compile it again for each constant."""
    template = made.get_call_template
    made.get_call_template = lambda args, kws: template(tuple(map(numba.types.unliteral, args)), kws)
