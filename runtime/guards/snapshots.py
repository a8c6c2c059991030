"""Copies and comparison of values outside of arguments, parameters and buffers, which a traced graph has as
constants."""

from __future__ import annotations

import copy
from array import array
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import suppress
from operator import is_
from types import MappingProxyType
from typing import Any

import numpy as np
import torch

PLAIN = frozenset({bool, int, float, complex, str, bytes, type(None), torch.dtype, torch.device})
"""Immutable types whose values are compared by type and content."""

UNSET = object()
"""A marker for a missing value. It never compares as the same as anything, itself included."""

_CONTAINERS: Mapping[type[Any], Callable[[Any], Iterable[Any]]] = {
    dict: dict.values,
    list: list.__iter__,
    tuple: tuple.__iter__,
    set: set.__iter__,
    frozenset: frozenset.__iter__,
    deque: deque.__iter__,
    bytearray: bytearray.__iter__,
}
"""By type of container, the method that iterates over its values. The built-in method is used, since subclasses
may override it."""
MOST = 10_000
"""The most entries of a container whose content is compared, since that happens at every call."""
MOST_NUMBERS = 1 << 20
"""The largest number of elements of an array whose content is compared."""
DEEPEST = 8
"""The largest nesting depth of containers whose content is compared."""


def unchanged(found: Mapping[str, Any], place: Any) -> tuple[dict[str, Any], dict[str, Any]]:
    """Return those values that a namespace still has under the same names: those that are the same objects, and those
    that are only equal by `same`. Others are left out."""
    objects, copies = dict[str, Any](), dict[str, Any]()
    for name, value in found.items():
        with suppress(LookupError, AttributeError, ValueError):  # it no longer exists, or its cell is empty
            now = place[name]
            if same(now, value):
                (objects if now is value else copies)[name] = value
    return objects, copies


def kept(value: Any, depth: int = DEEPEST) -> Any:
    """Return what `same` needs of a value: copies of containers and arrays, down to ``depth`` levels. Larger ones
    (`MOST`, `MOST_NUMBERS`) and all other values are returned themselves."""
    kind = _kind(value)
    if kind is array or (kind is np.ndarray and value.size <= MOST_NUMBERS):
        return copy.copy(value)
    if kind is MappingProxyType:
        return kept(dict(value), depth)
    if kind not in _CONTAINERS or kind.__len__(value) > MOST or not depth:
        return value
    if kind is dict:
        return {key: kept(part, depth - 1) for key, part in dict.items(value)}
    parts = [kept(part, depth - 1) for part in _CONTAINERS[kind](value)]
    if kind is tuple and all(map(is_, parts, _CONTAINERS[kind](value))):
        return value  # the same object is compared faster
    return kind(parts)


def parts_of(value: Any, depth: int = DEEPEST) -> Iterator[Any]:
    """Yield a value, or the values in a container, down to ``depth`` levels. Deeper and larger (`MOST`) containers
    are left out."""
    kind = _kind(value)
    if kind is np.ndarray and value.dtype == object:
        yield from parts_of(value.ravel().tolist(), depth)
    elif kind is MappingProxyType:
        yield from parts_of(dict(value), depth)
    elif kind not in _CONTAINERS:
        yield value
    elif depth and kind.__len__(value) <= MOST:
        for part in _CONTAINERS[kind](value):
            yield from parts_of(part, depth - 1)


def is_data(value: Any) -> bool:
    """Return whether a value is of a plain immutable type (`PLAIN`), a tensor, or a container of such values."""
    kind = type(value)
    if kind in (*_CONTAINERS, torch.Size):
        return all(map(is_data, value.values() if kind is dict else value))
    return kind in PLAIN or isinstance(value, torch.Tensor)


def same(a: Any, b: Any) -> bool:
    """Return whether ``a`` equals an earlier value ``b`` from `kept`: containers, with the order of keys, and small
    arrays by content, plain values with their types. All other values, tensors included, are compared by identity."""
    if a is b:
        return a is not UNSET
    kind = _kind(a)
    if kind is MappingProxyType:
        return same(dict(a), b)
    if kind is not _kind(b):
        return False
    if kind in (list, tuple, deque, dict):
        parts = _CONTAINERS[kind]
        if kind is dict and list(dict.keys(a)) != list(dict.keys(b)):
            return False
        return kind.__len__(a) == kind.__len__(b) and (
            all(map(is_, parts(a), parts(b))) or all(map(same, parts(a), parts(b)))
        )
    if kind is array:
        return bool((a.typecode, a.tobytes()) == (b.typecode, b.tobytes()))
    if kind is np.ndarray:
        return (
            a.size <= MOST_NUMBERS and (a.dtype, a.shape) == (b.dtype, b.shape) and a.tobytes() == b.tobytes()
        )
    return bool(a == b) if kind in _CONTAINERS else kind in PLAIN and repr(a) == repr(b)  # 0.0 is not −0.0


def _kind(value: Any) -> type[Any]:
    """Return the type by which a value is compared: the built-in container of a subclass, ``ndarray`` for NumPy,
    else its own."""
    if isinstance(value, (np.ndarray, np.generic)):
        return np.ndarray
    kind = type(value)
    return kind if kind in _CONTAINERS else next((k for k in _CONTAINERS if isinstance(value, k)), kind)
