"""The plans that were used last; older ones are dropped."""

from __future__ import annotations

from collections.abc import Hashable
from dataclasses import dataclass, field
from itertools import count
from typing import Any


@dataclass
class Recent:
    """Drops the cache entries that were not used for longest, so that a limited number of them remains.

    ``use`` makes one assignment, so that threads may call it at the same time. ``limit``: the largest number of
    entries. ``dropped``: the number of entries dropped so far.
    """

    limit: int
    dropped: int = 0
    _used: dict[Hashable, int] = field(default_factory=dict)
    _clock: Any = field(default_factory=count)

    def use(self, key: Hashable) -> None:
        """Note that the entries of a key are used now."""
        self._used[key] = next(self._clock)

    def trim(self, entries: dict[Any, list[Any]]) -> None:
        """Drop entries, in place, until there are no more than ``limit``: first those of the key that was not used
        for longest, and within a key the oldest.

        ``entries``: by key, the entries with that key, the oldest first. Keys without entries are removed.
        """
        while sum(map(len, entries.values())) > self.limit:
            oldest = min(entries, key=lambda key: self._used.get(key, -1))
            del entries[oldest][0]
            self.dropped += 1
            if not entries[oldest]:
                del entries[oldest]
                self._used.pop(oldest, None)
