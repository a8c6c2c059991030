"""Dicts that keep their latest entries."""

from __future__ import annotations

from typing import TypeVar

K = TypeVar("K")
V = TypeVar("V")


def remember(kept: dict[K, V], key: K, value: V, most: int) -> V:
    """Set ``kept[key]``, make it the latest entry, drop the oldest beyond ``most``, and return ``value``."""
    kept.pop(key, None)
    kept[key] = value
    while len(kept) > most:
        del kept[next(iter(kept))]
    return value
