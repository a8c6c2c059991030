"""The Python functions from which numba compiles loops: for the first plan on a machine where these are not compiled
yet."""

from __future__ import annotations

from collections.abc import Callable
from types import FunctionType
from typing import TypeVar, cast

from numba.core.dispatcher import Dispatcher

Loop = TypeVar("Loop", bound=Callable[..., object])


def plain(loop: Loop) -> Loop:
    """Return the Python function from which numba compiled ``loop``. It calls Python functions in place of those that
    numba compiled."""
    function = cast(FunctionType, loop.py_func if isinstance(loop, Dispatcher) else loop)
    known = function.__globals__
    called = {name: known[name] for name in function.__code__.co_names if name in known}
    loops = {name: plain(other) for name, other in called.items() if isinstance(other, Dispatcher)}
    return cast(
        Loop, FunctionType(function.__code__, {**known, **loops}, function.__name__, function.__defaults__)
    )
