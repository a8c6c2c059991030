"""Compile hot loops with numba, without losing their Python types."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache, partial
from hashlib import sha256
from pathlib import Path
from typing import Any, TypeVar, cast

import numba
from numba.core.options import DefaultOptions

UNCOUNTED = {"_nrt": False} if hasattr(DefaultOptions, "_nrt") else {}
"""numba's option for loops without reference counting; without the option they work, but are slower."""

Loop = TypeVar("Loop", bound=Callable[..., object])


def kernel(loop: Loop) -> Loop:
    """Compile ``loop`` at its first call with each combination of argument types. The machine code is cached on
    disk.

    If neither the package's folder nor the user's is writable, the loop is compiled again in each process.
    """
    return compiled(loop)


def inner(loop: Loop) -> Loop:
    """Like `borrowing`, for loops that only other kernels call.

    No entry point from Python is compiled; for a short loop that takes longer than the loop itself.
    """
    return borrowing(loop, no_cpython_wrapper=True, no_cfunc_wrapper=True)


def borrowing(loop: Loop, **options: bool) -> Loop:
    """Like `compiled`, for loops that neither create nor return arrays. They do not count references to their
    arguments.

    Counting needs atomic operations for each array and call, which took more than half of the annealer's time.
    """
    return compiled(loop, **UNCOUNTED, **options)


def compiled(loop: Loop, **options: bool) -> Loop:
    """Like `kernel`, with numba options: ``fastmath`` (sums may be reordered), ``nogil`` (other Python threads may
    run)."""
    compiler = cast(Any, numba.njit)  # numba's type hints list only some of its options
    try:
        made = compiler(cache=True, **options)(loop)
    except RuntimeError:  # numba found no folder for its cache
        return cast(Loop, compiler(**options)(loop))
    _stamp(made)
    _widen(made)
    return cast(Loop, made)


@cache
def _sources() -> str:
    """A hash of all of the planner's files that define kernels, which are those that import this module."""
    marker = b"numba_kernels import"
    texts = [path.read_bytes() for path in sorted(Path(__file__).parents[1].rglob("*.py"))]
    return sha256(b"".join(text for text in texts if marker in text)).hexdigest()


def _stamp(made: object) -> None:
    """Invalidate cached machine code when any of the planner's files with kernels has changed.

    numba checks only the kernel's own file, but the machine code contains the kernels that it calls. If a later
    numba stores its stamp elsewhere, numba's own rule applies.
    """
    file: Any = getattr(getattr(made, "_cache", None), "_cache_file", None)
    if hasattr(file, "_source_stamp"):
        file._source_stamp = _sources()
    if hasattr(file, "_load_index"):
        file._load_index = partial(_readable, file._load_index)


def _readable(load: Callable[[], dict[Any, Any]]) -> dict[Any, Any]:
    """Load an index of cached machine code; empty if it names a type that has since been renamed or moved.

    numba would raise an error for such a type before it compares the stamps.
    """
    try:
        return load()
    except (AttributeError, ImportError):
        return {}


def _widen(made: Any) -> None:
    """Let calls with a constant argument use the code for any number; numba would compile each constant separately."""
    template = made.get_call_template
    made.get_call_template = lambda args, kws: template(tuple(map(numba.types.unliteral, args)), kws)
