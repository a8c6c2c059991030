"""Values that a forward finds outside of its arguments, parameters and buffers: constants in what is traced, so that a
plan holds for as long as they do."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import suppress
from operator import is_
from typing import Any

import numpy as np
import torch

PLAIN = frozenset({bool, int, float, complex, str, bytes, type(None), torch.dtype, torch.device})
"""Types of which a value says all that there is to know."""

UNSET = object()
"""Stands for a value that is not there; it is the same as no value, itself included."""

_CONTAINERS: Mapping[type[Any], Callable[[Any], Iterable[Any]]] = {
    dict: dict.values,
    list: list.__iter__,
    tuple: tuple.__iter__,
    set: set.__iter__,
    frozenset: frozenset.__iter__,
    deque: deque.__iter__,
}
"""What is in a container of a kind, whatever the methods of a class of its own say or refuse to say."""
_MOST = 1000
"""Entries of a container that is looked into: all are looked at in every call."""
_MOST_NUMBERS = 1 << 16
"""Of an array that is looked into."""
_DEEPEST = 4
"""Containers within each other that are looked into."""


def unchanged(found: Mapping[str, Any], place: Any) -> tuple[dict[str, Any], dict[str, Any]]:
    """What was found by name and is the same there now: what is the very object, and what is a copy of it."""
    objects, copies = dict[str, Any](), dict[str, Any]()
    for name, value in found.items():
        with suppress(LookupError, AttributeError, ValueError):  # it is gone, or an empty cell
            now = place[name]
            if same(now, value):
                (objects if now is value else copies)[name] = value
    return objects, copies


def kept(value: Any, depth: int = _DEEPEST) -> Any:
    """The value, or a copy if it is a container or an array, whose content may change."""
    kind = _kind(value)
    if kind is np.ndarray and value.size <= _MOST_NUMBERS:
        return value.copy()
    if kind not in _CONTAINERS or kind.__len__(value) > _MOST or not depth:
        return value
    if kind is dict:
        return {key: kept(part, depth - 1) for key, part in dict.items(value)}
    parts = [kept(part, depth - 1) for part in _CONTAINERS[kind](value)]
    if kind is tuple and all(map(is_, parts, _CONTAINERS[kind](value))):
        return value  # which is soon compared
    return kind(parts)


def parts_of(value: Any, depth: int = _DEEPEST) -> Iterator[Any]:
    """A value, or what is in it if it is a container, or in a container within."""
    kind = _kind(value)
    if kind not in _CONTAINERS:
        yield value
    elif depth and kind.__len__(value) <= _MOST:
        for part in _CONTAINERS[kind](value):
            yield from parts_of(part, depth - 1)


def is_data(value: Any) -> bool:
    """Whether it is a plain value, a tensor, or a container of such."""
    kind = type(value)
    if kind in (*_CONTAINERS, torch.Size):
        return all(map(is_data, value.values() if kind is dict else value))
    return kind in PLAIN or isinstance(value, torch.Tensor)


def same(a: Any, b: Any) -> bool:
    """Whether a value is the one that was kept.

    Plain values are compared with their type (1, 1.0 and True are three), containers and NumPy's arrays by what is in
    them, and all else, tensors among it, by identity.
    """
    if a is b:
        return a is not UNSET
    kind = _kind(a)
    if kind is not _kind(b):
        return False
    if kind in (list, tuple, deque, dict):
        parts = _CONTAINERS[kind]
        if kind is dict and list(dict.keys(a)) != list(dict.keys(b)):
            return False
        return kind.__len__(a) == kind.__len__(b) and (
            all(map(is_, parts(a), parts(b))) or all(map(same, parts(a), parts(b)))
        )
    if kind is np.ndarray:
        return (
            a.size <= _MOST_NUMBERS
            and (a.dtype, a.shape) == (b.dtype, b.shape)
            and a.tobytes() == b.tobytes()
        )
    return bool(a == b) if kind in _CONTAINERS else kind in PLAIN and repr(a) == repr(b)  # 0 is not −0


def _kind(value: Any) -> type[Any]:
    """The value's type; of a container the built-in one that it is, and of a number of NumPy's that of an array."""
    if isinstance(value, (np.ndarray, np.generic)):
        return np.ndarray
    kind = type(value)
    return kind if kind in _CONTAINERS else next((k for k in _CONTAINERS if isinstance(value, k)), kind)
