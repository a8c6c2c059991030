"""The plans that were used last; older ones are dropped."""

from __future__ import annotations

from collections.abc import Hashable
from dataclasses import dataclass, field
from itertools import count
from typing import Any


@dataclass
class Recent:
    """Keeps a number of entries: those of the keys that were used last.

    Noting a use is one assignment, so that threads may do it at the same time. ``dropped``: the number of entries
    dropped so far.
    """

    limit: int
    dropped: int = 0
    _used: dict[Hashable, int] = field(default_factory=dict)
    _clock: Any = field(default_factory=count)

    def use(self, key: Hashable) -> None:
        """Note that a key is used now."""
        self._used[key] = next(self._clock)

    def trim(self, entries: dict[Any, list[Any]]) -> None:
        """Drop entries until there are no more than the limit: first those of the keys that were used longest
        ago, and within a key the oldest. The newest entry of the key that was used last is kept."""
        while sum(map(len, entries.values())) > self.limit:
            oldest = min(entries, key=lambda key: self._used.get(key, -1))
            del entries[oldest][0]
            self.dropped += 1
            if not entries[oldest]:
                del entries[oldest]
                self._used.pop(oldest, None)
