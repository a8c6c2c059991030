"""What can be reached from a value through containers and objects: everything whose state a forward may change."""

from __future__ import annotations

import threading
import weakref
from collections.abc import Collection, Iterator
from functools import partial
from types import BuiltinMethodType, MappingProxyType, MethodType
from typing import Any

import numpy as np
import torch
from torch import nn

from rematplan.runtime.guards.bytecode import is_library
from rematplan.runtime.guards.containers import CONTAINERS, items_in
from rematplan.runtime.guards.iterators import is_iterator

_METHODS: tuple[Any, ...] = (MethodType, BuiltinMethodType, type((1).__add__))
_WEAK: tuple[Any, ...] = (weakref.WeakKeyDictionary, weakref.WeakValueDictionary, weakref.WeakSet)
_RECORDS = ("types", "collections", "argparse")
_MOST = 200_000
"""The largest number of values that are looked at, so that a data set among the attributes does not take minutes."""


def reached(value: Any, seen: set[int], known: Collection[int] = ()) -> Iterator[Any]:
    """Yield the containers, arrays, iterators and attribute dictionaries that can be reached from a value, each once.
    Modules, tensors and objects of libraries are not entered; after `_MOST` values it ends. ``seen``: the ids of what
    was reached, to which it adds; ``known``: the ids of attribute dictionaries to be left out."""
    todo = [value]
    while todo and len(seen) < _MOST:
        one = todo.pop()
        if isinstance(one, (str, bytes, int, float, nn.Module, torch.Tensor, type)) or one is None:
            continue
        if id(one) in seen or id(one) in known:
            continue
        seen.add(id(one))
        if isinstance(one, (*CONTAINERS, np.ndarray)) or is_iterator(one):
            yield one
        todo += _parts(one)


def _parts(one: Any) -> list[Any]:
    """Return what an object refers to: items of a container, arguments of a partial function, the object of a method,
    attributes of an object whose class `_is_open`."""
    if isinstance(one, MappingProxyType):
        return list(one.values())
    if isinstance(one, _METHODS):
        return [one.__self__]
    if isinstance(one, partial):
        return [one.func, one.args, one.keywords]
    if isinstance(one, _WEAK):
        return [one.data]
    attributes = getattr(one, "__dict__", None)
    own = type(attributes) is dict and _is_open(type(one))
    return [*items_in(one), *([attributes] if own else ())]


def _is_open(kind: type) -> bool:
    """Return whether objects of a class are entered: a user's class, a container, or a plain record of Python."""
    return issubclass(kind, (*CONTAINERS, threading.local)) or (
        kind.__module__ in _RECORDS or not is_library(kind.__module__, ())
    )
