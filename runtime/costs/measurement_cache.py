"""The cache file of measurements: costs of calls, and whether kernels keep the bits of rows. It is read again only if
another process changed it, and written for at most `SHARE` of the time."""

from __future__ import annotations

import atexit
import json
import os
import time
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from threading import RLock
from typing import TypeAlias, TypeVar

from rematplan.ir.cache_folder import read_cached, report_damage, write_cached
from rematplan.runtime.graph.call_cost import CallCost

SHARE = 20
"""A file is written again after this many times the seconds that writing it took, or when the process ends."""
Stamp: TypeAlias = tuple[int, int, int] | None
Measured: TypeAlias = CallCost | bool
"""What was measured: a call's cost, or whether its rows have the same bits in parts."""
Kind = TypeVar("Kind", CallCost, bool)


@dataclass
class _Content:
    """The content of one cache file as this process knows it."""

    stamp: Stamp = None
    """Inode, size and time of the file when this process last read or wrote it; None if there was none."""
    entries: dict[str, Measured] = field(default_factory=dict)
    """All that was measured, by signature of the calls."""
    unsaved: dict[str, Measured] = field(default_factory=dict)
    """What is not in the file yet."""
    due: float = 0.0
    """The earliest `time.monotonic` for the next write, except at exit."""


_contents: dict[Path, _Content] = {}
_lock = RLock()


def load(file: Path, kind: type[Kind], texts: Iterable[str]) -> dict[str, Kind]:
    """Return the measurements of one kind that a cache file has for these ``texts`` of calls, those included that are
    still to be written. A missing or damaged file counts as empty."""
    with _lock:
        entries = _known(file).entries
        return {text: one for text in texts if isinstance(one := entries.get(text), kind)}


def save(file: Path, found: Mapping[str, Measured]) -> None:
    """Add what was measured to a cache file, now or, if it was written shortly before, later or at exit. It can be
    loaded at once."""
    with _lock:
        known = _known(file)
        known.entries.update(found)
        known.unsaved.update(found)
        if time.monotonic() >= known.due:
            _write(file, known)


def _known(file: Path) -> _Content:
    known = _contents.setdefault(file, _Content())
    stamp = _stamp(file)
    if stamp is None or stamp != known.stamp:
        known.stamp, known.due = stamp, 0.0
        known.entries = {**_read(file), **known.unsaved}
    return known


def _stamp(file: Path) -> Stamp:
    try:
        found = os.stat(file)
    except OSError:
        return None
    return found.st_ino, found.st_size, found.st_mtime_ns


def _read(file: Path) -> dict[str, Measured]:
    data = read_cached(file)
    if data is None:
        return {}
    try:
        return {str(k): one if isinstance(one, bool) else CallCost.from_row(*one) for k, one in data.items()}  # type: ignore[attr-defined]
    except (ValueError, TypeError, AttributeError) as error:
        report_damage(file, str(error))
        return {}


def _write(file: Path, known: _Content) -> None:
    """Write all entries to the file now. Note in ``known`` the file's stamp, when the next write is due, and, if the
    file was written, that nothing is unsaved."""
    began = time.monotonic()
    rows = {k: one if isinstance(one, bool) else one.to_row() for k, one in known.entries.items()}
    if write_cached(file, json.dumps(rows)):
        known.unsaved.clear()
    known.stamp = _stamp(file)
    ended = time.monotonic()
    known.due = ended + SHARE * (ended - began)


@atexit.register
def _write_all() -> None:
    for file, known in _contents.items():
        if known.unsaved and file.parent.is_dir():
            _write(file, _known(file))
