"""Read JSON files, and write any file completely or not at all."""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any, TypeVar, cast
from uuid import uuid4

from rematplan.ir.errors import ProblemError, UsageError

T = TypeVar("T")


def read_json(path: str | Path) -> object:
    """Return the JSON data of a file. `ProblemError`, which does not name the file, if it cannot be read, is not
    JSON, or has ``NaN`` or ``Infinity``."""

    def refuse(word: str) -> float:
        raise ProblemError(f"{word} is not a number")

    try:
        return cast(object, json.loads(Path(path).read_text(encoding="utf-8"), parse_constant=refuse))
    except OSError as error:
        raise ProblemError(f"cannot be read: {error.strerror}") from None
    except (ValueError, RecursionError) as error:
        raise ProblemError(f"is not JSON: {error}") from None


def read_as(path: str | Path, convert: Callable[[object], T]) -> T:
    """Return what ``convert`` makes of the data of a JSON file. A `ProblemError`, its own or of `read_json`, then names
    the file."""
    try:
        return convert(read_json(path))
    except ProblemError as error:
        raise ProblemError(f"{path}: {error}") from None


def stated_json(path: str | Path) -> object:
    """Read a JSON file that a user names; `UsageError` if it cannot be read."""
    try:
        return read_json(path)
    except ProblemError as error:
        raise UsageError(f"{path}: {error}") from None


def write_whole(path: str | Path, content: str | bytes) -> None:
    """Write a file completely or not at all; `ProblemError` if that fails. An existing file keeps its mode. Links are
    followed; an existing special file such as ``/dev/stdout`` is written directly."""
    data = content.encode() if isinstance(content, str) else content
    path = Path(path)
    try:
        if path.exists() and not path.is_file() and not path.is_dir():
            path.write_bytes(data)
            return
        path = path.resolve()
        temporary = path.parent / f".{path.name[:32]}.{uuid4().hex}"
        try:
            with open(temporary, "xb") as file:
                if path.exists():
                    shutil.copymode(path, temporary)
                file.write(data)
            os.replace(temporary, path)
        except BaseException:
            temporary.unlink(missing_ok=True)
            raise
    except OSError as error:
        raise ProblemError(f"{path}: cannot be written: {error.strerror}") from None


def typed(value: object, kind: type | tuple[type, ...], where: str) -> Any:
    """Return ``value`` if it has the type ``kind``. `ProblemError` if not, and for true and false, whatever ``kind``
    is. ``where``: what the message calls the value."""
    if not isinstance(value, kind) or isinstance(value, bool):
        wanted = " or ".join(k.__name__ for k in (kind if isinstance(kind, tuple) else (kind,)))
        raise ProblemError(f"{where} is {str(value)[:40]!r}, not of type {wanted}")
    return value


def field_of(data: object, key: str, kind: type | tuple[type, ...], where: str) -> Any:
    """Return the field ``key`` of the JSON object ``data``. `ProblemError` if ``data`` is no object, or the field is
    missing or not of the type ``kind``."""
    row = typed(data, dict, where)
    if key not in row:
        raise ProblemError(f"{where}: {key!r} is missing")
    return typed(row[key], kind, f"{where}: {key}")


def names_of(values: Iterable[object], where: str) -> tuple[str, ...]:
    """Return the texts of a JSON list; `ProblemError` if it has anything but texts."""
    return tuple(typed(v, str, where) for v in values)
