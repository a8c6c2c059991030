"""Decorators that compile functions with numba and cache their machine code. They keep the functions' type hints."""

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
    """Have numba compile ``loop`` at its first call with each combination of types. Machine code is cached on
    disk if a folder is writable.
    """
    return compiled(loop)


def unlocked(loop: Loop) -> Loop:
    """Have numba compile ``loop`` and cache its machine code, as `kernel` does. A call releases the GIL, so that other
    Python threads can run meanwhile."""
    return compiled(loop, nogil=True)


def unlocked_borrowing(loop: Loop) -> Loop:
    """Have numba compile ``loop``, which neither creates nor returns arrays, so that a call releases the GIL and counts
    no references."""
    return borrowing(loop, nogil=True)


def vector_inner(loop: Loop) -> Loop:
    """Have numba compile ``loop`` for calls by other compiled functions, with sums in any order. It must not call
    itself, nor create or return arrays."""
    # Sums of integers are exact in any order. A recursive function crashes when it is loaded from the cache on disk.
    return borrowing(loop, fastmath=True, no_cpython_wrapper=True, no_cfunc_wrapper=True)


def inner(loop: Loop) -> Loop:
    """Have numba compile ``loop``, which other compiled functions call, and which neither creates nor returns
    arrays.
    """
    # Wrappers for calls from Python would take longer to compile than a short function.
    return borrowing(loop, no_cpython_wrapper=True, no_cfunc_wrapper=True)


def borrowing(loop: Loop, **options: bool) -> Loop:
    """Have numba compile ``loop``, which neither creates nor returns arrays, without counting references to
    its arguments.
    """
    # Counting took more than half of the annealer's time.
    return compiled(loop, **UNCOUNTED, **options)


def compiled(loop: Loop, **options: bool) -> Loop:
    """Have numba compile ``loop`` with ``options`` at its first call with each combination of types; cached
    on disk if possible.
    """
    made = cast(Any, numba.njit)(**options)(loop)  # numba's type hints list only some of its options
    with suppress(RuntimeError):  # numba found no folder for its cache
        made._cache = _Cache(loop)
        _make_readable(made._cache)
    _widen(made)
    return cast(Loop, made)


def are_compiled(loops: Iterable[object]) -> bool:
    """Return whether each of the functions ``loops`` is compiled for this processor: its machine code is loaded in
    this process or cached on disk."""
    return all(_is_compiled(cast(Any, loop)) for loop in loops)


def _is_compiled(loop: Any) -> bool:
    if loop.overloads:
        return True
    file = getattr(loop._cache, "_cache_file", None)
    processor = loop.targetctx.codegen().magic_tuple()
    return file is not None and any(key[1] == processor for key in file._load_index())


@cache
def _sources() -> str:
    """Return a hash of the text of all files of the planner that define compiled functions. These are the files that
    import this module."""
    marker = b"numba_kernels import"
    texts = [path.read_bytes() for path in sorted(Path(__file__).parents[1].rglob("*.py"))]
    return sha256(b"".join(text for text in texts if marker in text)).hexdigest()


class _Locator(caching.UserWideCacheLocator):
    """Tells numba to cache machine code in rematplan's folder, by numba's version and a hash of all files
    with compiled functions.
    """

    def __init__(self, py_func: Any, py_file: str) -> None:
        super().__init__(py_func, py_file)  # type: ignore[no-untyped-call]
        # Machine code contains the functions that it calls, so all these files count; numba checks the
        # function's file alone.
        self._cache_path = str(cache_folder() / "kernels" / f"numba-{numba.__version__}-{_sources()[:16]}")

    def ensure_cache_path(self) -> None:
        """Create the folder; OSError if it is neither writable nor has machine code to read."""
        # numba refuses folders that are not writable, such as one from a container image, and would compile
        # in each process.
        if next(Path(self._cache_path).glob("*.nbi"), None) is None:
            super().ensure_cache_path()  # type: ignore[no-untyped-call]

    def get_source_stamp(self) -> str:
        """Return the text whose change makes cached machine code invalid: a hash of all files with compiled
        functions, and a hash of this function's file."""
        return f"{_sources()} {sha256(Path(self._py_file).read_bytes()).hexdigest()}"

    def get_disambiguator(self) -> str:
        """Return the file and line of the function, to distinguish compiled functions of one name."""
        return f"{Path(self._py_file).stem}-{self._lineno}"


class _Implementation(caching.CompileResultCacheImpl):
    """Caches machine code in the user's cache folder of rematplan; if that is not writable, where numba does by
    default."""

    _locator_classes = [_Locator, *caching.CompileResultCacheImpl._locator_classes]  # noqa: RUF012


class _Cache(caching.FunctionCache):
    """The cache of one function's machine code. If a file is damaged or cannot be written, the function is
    compiled again.
    """

    _impl_class = _Implementation

    def load_overload(self, sig: Any, target_context: Any) -> Any:
        """Return the cached machine code for a signature (the types of the arguments); None if there is none, or if
        its file is damaged."""
        try:
            return super().load_overload(sig, target_context)  # type: ignore[no-untyped-call]
        except Exception as error:  # pickle raises almost anything
            report_damage(Path(self._cache_file._index_path), repr(error))
            return None

    def save_overload(self, sig: Any, data: Any) -> None:
        """Write the machine code for a signature to disk. If that fails, log it and go on."""
        try:
            super().save_overload(sig, data)  # type: ignore[no-untyped-call]
        except OSError as error:
            log_once(f"compiled loops cannot be kept for later processes: {error.strerror}")


def _make_readable(made: Any) -> None:
    """Change a function's cache so that an index file which cannot be read counts as empty. ``made``: the `_Cache`."""
    file = made._cache_file
    file._load_index = partial(_readable, file._load_index, Path(file._index_path))


def _readable(load: Callable[[], dict[Any, Any]], file: Path) -> dict[Any, Any]:
    """Load an index file of machine code with ``load``; empty if it is damaged, or names a type that was
    renamed or moved.
    """
    try:
        return load()
    except (AttributeError, ImportError):
        # numba would raise: it compares source stamps after it loads the types.
        return {}
    except Exception as error:  # pickle raises almost anything
        report_damage(file, repr(error))
        return {}


def _widen(made: Any) -> None:
    """Let calls of a compiled function with constants use its code for any number; numba would compile each
    constant.
    """
    template = made.get_call_template
    made.get_call_template = lambda args, kws: template(tuple(map(numba.types.unliteral, args)), kws)
