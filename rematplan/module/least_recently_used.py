"""A limit on the number of cache entries: the entries that were not used for longest are dropped."""

from __future__ import annotations

from collections.abc import Hashable
from dataclasses import dataclass, field
from itertools import count
from typing import Any


@dataclass
class Recent:
    """Drops the cache entries that were not used for longest, so that at most ``limit`` of them remain. Entries with
    the same key count as used together.

    ``limit``: the largest number of entries. ``dropped``: the number of entries dropped so far. Threads may call `use`
    at the same time, since it makes only one assignment.
    """

    limit: int
    dropped: int = 0
    _used: dict[Hashable, int] = field(default_factory=dict)
    _clock: Any = field(default_factory=count)

    def use(self, key: Hashable) -> None:
        """Record that the cache entries with this key are used now."""
        self._used[key] = next(self._clock)

    def trim(self, entries: dict[Any, list[Any]]) -> None:
        """Remove entries from ``entries`` until at most ``limit`` remain. The first to go are those of the key that was
        not used for longest, and of these the oldest.

        ``entries``: a dictionary from each key to a list of its entries, the oldest first. It is changed in place. A
        key is removed together with its last entry.
        """
        while sum(map(len, entries.values())) > self.limit:
            oldest = min(entries, key=lambda key: self._used.get(key, -1))
            del entries[oldest][0]
            self.dropped += 1
            if not entries[oldest]:
                del entries[oldest]
                self._used.pop(oldest, None)
