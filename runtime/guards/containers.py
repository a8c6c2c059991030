"""The content of containers and arrays: found, copied, compared and restored in place."""

from __future__ import annotations

import copy
import weakref
from array import array
from collections import OrderedDict, deque
from collections.abc import Collection, Iterator
from operator import is_
from typing import Any

import numpy as np

from rematplan.runtime.guards.snapshots import DEEPEST, MOST, MOST_NUMBERS

CONTAINERS: tuple[Any, ...] = (OrderedDict, dict, list, set, deque, bytearray, array)
"""The types of containers whose content may change. Their subclasses count, too."""


_MOST_BYTES = 1 << 26


def _form(numbers: Any) -> tuple[Any, ...]:
    return numbers.shape, numbers.dtype, numbers.tobytes()


def containers_in(value: Any) -> Iterator[Any]:
    """Yield a value if it is one of `CONTAINERS` or an array, and all containers and arrays in it, each once. Tuples
    and frozen sets are entered but not yielded; attributes of containers are entered, too."""
    seen: set[int] = set()
    todo = [value]
    while todo:
        one = todo.pop()
        if isinstance(one, (tuple, frozenset)):
            todo.extend(items_in(one))
        elif isinstance(one, (*CONTAINERS, np.ndarray)) and id(one) not in seen:
            seen.add(id(one))
            yield one
            todo.extend(items_in(one))
            if getattr(one, "__dict__", None):
                todo.append(vars(one))


def items_in(container: Any) -> list[Any]:
    """Return the items of a container: of a dictionary the values, of an array of objects the objects. Empty for bytes,
    other arrays and all other values."""
    if isinstance(container, np.ndarray):
        return container.ravel().tolist() if container.dtype == object else []
    # Subclasses may override methods, so those of the built-in types are used.
    kinds = (dict, list, tuple, set, frozenset, deque)
    kind = next((kind for kind in kinds if isinstance(container, kind)), None)
    if kind is None:
        return []
    return [*(dict.values(container) if kind is dict else kind.__iter__(container))]


def compared_in(value: Any, depth: int = DEEPEST) -> Iterator[Any]:
    """Yield the containers and arrays in a value, itself included, whose content `snapshots.same` compares. Left out
    are those larger than `MOST` or `MOST_NUMBERS`, and those below ``depth`` levels."""
    if isinstance(value, np.ndarray):
        if value.size <= MOST_NUMBERS:
            yield value
    elif (
        isinstance(value, (*CONTAINERS, tuple, frozenset)) and depth and len(items := items_in(value)) <= MOST
    ):
        yield value
        for part in items:
            yield from compared_in(part, depth - 1)


def content(container: Any) -> Any:
    """Return a shallow copy of a container's content as a built-in container; None for an array above 64 MiB."""
    if isinstance(container, np.ndarray):
        return container.copy() if container.nbytes <= _MOST_BYTES else None
    if isinstance(container, array):
        return copy.copy(container)
    kind = next(kind for kind in (dict, list, set, deque, bytearray) if isinstance(container, kind))
    return kind(dict.items(container)) if kind is dict else kind(container)


def unchanged_content(container: Any, was: Any) -> bool:
    """Return whether a container has the content ``was``, from `content`: the same objects in order, equal sets, or the
    same bytes; true for large arrays."""
    if isinstance(container, np.ndarray):
        return was is None or _form(container) == _form(was)
    if len(container) != len(was):
        return False
    if isinstance(container, dict):
        pairs = zip(dict.items(container), dict.items(was), strict=True)
        return all(v is w and (k is j or k == j) for (k, v), (j, w) in pairs)
    if isinstance(container, array):
        return bool(container.tobytes() == was.tobytes())
    if isinstance(container, (set, bytearray)):
        return bool(container == was)
    return all(map(is_, container, was))


def refill(container: Any, was: Any) -> None:
    """Give a container, in place, the content ``was``, in the form that `content` returns, not None. An array must have
    the shape of ``was``."""
    if isinstance(container, np.ndarray):
        container[...] = was
        return
    kind = next(kind for kind in CONTAINERS if isinstance(container, kind))
    if kind in (list, bytearray, array):
        kind.__setitem__(container, slice(None), was)
    else:
        kind.clear(container)
        (kind.extend if kind is deque else kind.update)(container, was)


def added(container: Any, was: Any) -> Any:
    """Return what a container has in addition to ``was``, as a container; of a dictionary also entries with other
    values. None if items of ``was`` are missing or no longer the first, or for a bounded deque, an array or bytes."""
    if isinstance(container, dict):
        if any(key not in container for key in was):
            return None
        return {k: v for k, v in dict.items(container) if k not in was or was[k] is not v}
    if isinstance(container, set):
        return container - was if was <= container else None
    if isinstance(container, list) or (isinstance(container, deque) and container.maxlen is None):
        begins_alike = len(container) >= len(was) and all(map(is_, was, container))
        return list(container)[len(was) :] if begins_alike else None
    return None


def copied(value: Any) -> Any:
    """Return a copy of a container or array, with copies of the containers in it; any other value, and a tuple without
    such containers, itself."""
    if isinstance(value, np.ndarray):
        return value.copy()
    if isinstance(value, tuple):
        parts = [copied(part) for part in value]
        if all(map(is_, parts, value)):
            return value
        return value._make(parts) if hasattr(value, "_make") else type(value)(parts)
    if not isinstance(value, CONTAINERS):
        return value
    other = copy.copy(value)
    if isinstance(other, dict):
        for key, part in dict.items(other):
            if isinstance(part, (*CONTAINERS, tuple, np.ndarray)):
                dict.__setitem__(other, key, copied(part))
    elif isinstance(other, (list, deque)):
        for at, part in enumerate(other):
            if isinstance(part, (*CONTAINERS, tuple, np.ndarray)):
                other[at] = copied(part)
    return other


def add(container: Any, items: Any) -> None:
    """Add items to a container, in place."""
    (container.extend if isinstance(container, (list, deque)) else container.update)(items)


def refilled(now: Any, after: Any) -> Any:
    """Return ``now``, changed in place to the content of ``after``, at each level. Return a copy of ``after`` if their
    types differ or ``now`` is a tuple with other items."""
    if type(now) is not type(after) or not isinstance(now, (*CONTAINERS, tuple, np.ndarray)):
        return copied(after)
    if isinstance(now, dict):
        parts: Any = {k: refilled(now[k], v) if k in now else copied(v) for k, v in dict.items(after)}
    elif isinstance(now, (list, tuple, deque)):
        parts = [*map(refilled, now, after), *map(copied, list(after)[len(now) :])]
    else:
        parts = after
    if isinstance(now, tuple):
        return now if len(now) == len(after) and all(map(is_, now, parts)) else copied(after)
    refill(now, parts)
    return now


def lists_any(value: Any, own: Collection[int]) -> bool:
    """Return whether a value is or has, at any depth, a container with an object, or a weak reference to one, whose id
    is in ``own``."""
    return any(
        id(item() if isinstance(item, weakref.ref) else item) in own
        for one in containers_in(value)
        for item in items_in(one)
    )
