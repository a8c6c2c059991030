"""A limit on the number of cache entries: the entries that were not used for longest are dropped."""

from __future__ import annotations

from collections.abc import Hashable
from dataclasses import dataclass, field
from itertools import count
from typing import Any


@dataclass
class LeastRecentlyUsed:
    """Drops the entries that were not used for longest. Entries with the same key count as used together."""

    limit: int
    """The largest number of entries that remain."""
    dropped: int = 0
    """The number of entries dropped so far."""
    _used: dict[Hashable, int] = field(default_factory=dict)
    _clock: Any = field(default_factory=count)

    def use(self, key: Hashable) -> None:
        """Record that the cache entries with this key are used now."""
        self._used[key] = next(self._clock)

    def trim(self, entries: dict[Any, list[Any]]) -> None:
        """Remove entries, in place, until ``limit`` remain: those of the key that was not used for longest, the oldest
        first. ``entries``: a list of entries, the oldest first, by key."""
        while sum(map(len, entries.values())) > self.limit:
            oldest = min(entries, key=lambda key: self._used.get(key, -1))
            del entries[oldest][0]
            self.dropped += 1
            if not entries[oldest]:
                del entries[oldest]
                self._used.pop(oldest, None)
