"""Compile hot loops with numba, without losing their Python types."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from contextlib import suppress
from functools import cache, partial
from hashlib import sha256
from pathlib import Path
from typing import Any, TypeVar, cast

import numba
from numba.core import caching
from numba.core.options import DefaultOptions

from rematplan.ir.cache_folder import cache_folder, log_once, report_damage

UNCOUNTED = {"_nrt": False} if hasattr(DefaultOptions, "_nrt") else {}
"""numba's option for loops without reference counting; without the option they work, but are slower."""

Loop = TypeVar("Loop", bound=Callable[..., object])


def kernel(loop: Loop) -> Loop:
    """Have numba compile the function ``loop`` at its first call with each combination of argument types. Machine
    code is cached on disk.

    If no folder for the cache is writable, the function is compiled again in each process.
    """
    return compiled(loop)


def inner(loop: Loop) -> Loop:
    """Have numba compile the function ``loop``, which only other compiled functions call and which neither creates
    nor returns arrays.

    Its entry points from Python are not compiled: for a short loop that takes longer than the loop itself.
    References to its arguments are not counted.
    """
    return borrowing(loop, no_cpython_wrapper=True, no_cfunc_wrapper=True)


def borrowing(loop: Loop, **options: bool) -> Loop:
    """Have numba compile the function ``loop``, which neither creates nor returns arrays, without counting
    references to its arguments. Counting them took more than half of the annealer's time.

    ``options``: of numba, such as ``nogil`` (other Python threads may run).
    """
    return compiled(loop, **UNCOUNTED, **options)


def compiled(loop: Loop, **options: bool) -> Loop:
    """Have numba compile the function ``loop`` at its first call with each combination of argument types, with
    options. Machine code is cached on disk.

    ``options``: of numba, such as ``fastmath`` (sums may be reordered) or ``nogil`` (other Python threads may run).
    """
    made = cast(Any, numba.njit)(**options)(loop)  # numba's type hints list only some of its options
    with suppress(RuntimeError):  # numba found no folder for its cache
        made._cache = _Cache(loop)
        _make_readable(made._cache)
    _widen(made)
    return cast(Loop, made)


def are_compiled(loops: Iterable[object]) -> bool:
    """Return whether the machine code of all these functions for this processor is loaded or in the cache on disk."""
    return all(_is_compiled(cast(Any, loop)) for loop in loops)


def _is_compiled(loop: Any) -> bool:
    if loop.overloads:
        return True
    file = getattr(loop._cache, "_cache_file", None)
    processor = loop.targetctx.codegen().magic_tuple()
    return file is not None and any(key[1] == processor for key in file._load_index())


@cache
def _sources() -> str:
    """A hash of all of the planner's files that define kernels, which are those that import this module."""
    marker = b"numba_kernels import"
    texts = [path.read_bytes() for path in sorted(Path(__file__).parents[1].rglob("*.py"))]
    return sha256(b"".join(text for text in texts if marker in text)).hexdigest()


class _Locator(caching.UserWideCacheLocator):
    """Put machine code in the user's folder for rematplan, by the version of numba and of the planner's kernels.

    Installations with equal kernels share it. The stamp covers all files with kernels: numba's own covers only the
    kernel's file, but machine code contains the kernels that it calls. The index of a file tells processors apart.
    """

    def __init__(self, py_func: Any, py_file: str) -> None:
        super().__init__(py_func, py_file)  # type: ignore[no-untyped-call]
        self._cache_path = str(cache_folder() / "kernels" / f"numba-{numba.__version__}-{_sources()[:16]}")

    def get_source_stamp(self) -> str:
        """Return the hash of all files with kernels, and of the kernel's own."""
        return f"{_sources()} {sha256(Path(self._py_file).read_bytes()).hexdigest()}"

    def get_disambiguator(self) -> str:
        """Return what tells kernels of one name apart."""
        return f"{Path(self._py_file).stem}-{self._lineno}"


class _Implementation(caching.CompileResultCacheImpl):
    """Look in the user's folder first, then where numba does."""

    _locator_classes = [_Locator, *caching.CompileResultCacheImpl._locator_classes]  # noqa: RUF012


class _Cache(caching.FunctionCache):
    """The cache of one kernel. A file that is damaged or cannot be written costs a compilation, nothing else."""

    _impl_class = _Implementation

    def load_overload(self, sig: Any, target_context: Any) -> Any:
        """Return the machine code for a signature; None if there is none, or its file is damaged."""
        try:
            return super().load_overload(sig, target_context)  # type: ignore[no-untyped-call]
        except Exception as error:  # pickle raises almost anything
            report_damage(Path(self._cache_file._index_path), repr(error))
            return None

    def save_overload(self, sig: Any, data: Any) -> None:
        """Write machine code, if the disk takes it."""
        try:
            super().save_overload(sig, data)  # type: ignore[no-untyped-call]
        except OSError as error:
            log_once(f"compiled loops cannot be kept for later processes: {error.strerror}")


def _make_readable(made: Any) -> None:
    """Make an index of cached machine code count as empty if it cannot be read."""
    file = made._cache_file
    file._load_index = partial(_readable, file._load_index, Path(file._index_path))


def _readable(load: Callable[[], dict[Any, Any]], file: Path) -> dict[Any, Any]:
    """Load an index of cached machine code; empty if it is damaged, or names a type that has since been renamed or
    moved.

    numba would raise an error for such a type before it compares the stamps.
    """
    try:
        return load()
    except (AttributeError, ImportError):
        return {}
    except Exception as error:  # pickle raises almost anything
        report_damage(file, repr(error))
        return {}


def _widen(made: Any) -> None:
    """Let calls with a constant argument use the code for any number; numba would compile each constant separately."""
    template = made.get_call_template
    made.get_call_template = lambda args, kws: template(tuple(map(numba.types.unliteral, args)), kws)
