"""Read fields of JSON data, with errors that say where the fault is. A reader makes a value of data, or raises."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar

from rematplan.ir import ProblemError

LARGEST = 2**62
"""A bound of all numbers of a file: of bytes and counts."""
Read = TypeVar("Read")


def field_of(data: Any, name: str, read: Callable[[Any], Read]) -> Read:
    """Return what ``read`` makes of a field of a JSON object. `ProblemError` if the field is missing, or ``read``
    raises a `ProblemError`, `TypeError` or `ValueError`."""
    if name not in data:
        raise ProblemError(f"{name} is missing")
    return _at(name, read, data[name])


def list_of(read: Callable[[Any], Read]) -> Callable[[Any], list[Read]]:
    """Return a function that reads a list whose entries ``read`` reads. If ``read`` refuses an entry, a `ProblemError`
    states its position; `TypeError` if the value is no list."""

    def entries(value: object) -> list[Read]:
        return [_at(f"entry {at}", read, one) for at, one in enumerate(json_list(value))]

    return entries


def _at(place: str, read: Callable[[Any], Read], value: object) -> Read:
    try:
        return read(value)
    except (ProblemError, TypeError, ValueError) as error:
        raise ProblemError(f"{place}: {error}") from None


def _of_type(kind: type[Read], name: str) -> Callable[[object], Read]:
    """Return a function that returns values of the type ``kind``, and raises a TypeError for others. ``name``: what the
    error calls the type."""

    def read(value: object) -> Read:
        if not isinstance(value, kind):
            raise TypeError(f"{shown(value)} is not {name}")
        return value

    return read


json_object: Callable[[object], dict[str, Any]] = _of_type(dict, "an object")
json_list: Callable[[object], list[Any]] = _of_type(list, "a list")
text = _of_type(str, "a text")


def whole(value: object) -> int:
    """Return ``value`` if it is a whole number from 0 to below `LARGEST`; else raise `TypeError` or `ValueError`."""
    if isinstance(value, bool) or not isinstance(value, int):
        raise TypeError(f"{shown(value)} is not a whole number")
    if not 0 <= value < LARGEST:
        raise ValueError(f"{str(value)[:40]} is not from 0 to {LARGEST:.0e}")
    return value


def shown(value: object) -> str:
    """Return the beginning of a value as text, for an error message."""
    return repr(str(value)[:40])
