"""Iterators that a forward advances, which a fixed graph cannot repeat."""

from __future__ import annotations

import warnings
from collections.abc import Iterator
from inspect import getattr_static
from types import GeneratorType
from typing import Any, NoReturn

from rematplan.ir import ModelError


def is_iterator(value: Any) -> bool:
    """Return whether a value is one of Python's own iterators, whose state cannot be seen or restored."""
    return isinstance(value, Iterator) and type(value).__module__ in ("builtins", "itertools")


def is_computed(holder: Any, name: str) -> bool:
    """Return whether a property computes an attribute at each read, so that its value is no state."""
    return isinstance(getattr_static(holder, name, None), property)


def refuse_iterator(name: str, iterator: Any) -> NoReturn:
    """Raise the error that a forward reads an iterator. ``name``: the variable that has it."""
    raise ModelError(
        f"the forward reads {name}, a {type(iterator).__name__}, which gives something else at each call; take the "
        f"next item before the call and pass it as an argument"
    )


def progress(iterator: Any) -> Any:
    """Return a value that changes as an iterator advances. None for an ended generator, and for an iterator that cannot
    be reduced."""
    if isinstance(iterator, GeneratorType):
        frame = iterator.gi_frame
        return frame and (frame.f_lasti, repr(frame.f_locals))
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            return repr(iterator.__reduce__())
    except TypeError:
        return None
