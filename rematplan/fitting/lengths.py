"""The lengths of a data set's samples. The batch with the longest one must fit: all of it is padded to that length."""

from __future__ import annotations

import re
from dataclasses import dataclass
from pathlib import Path

from rematplan.ir import UsageError


@dataclass(frozen=True)
class Lengths:
    """How many samples a data set has of each length."""

    counts: tuple[tuple[int, int], ...]
    """Pairs of a length and the number of samples that have it, by rising length."""

    @property
    def longest(self) -> int:
        """The length of the longest sample."""
        return self.counts[-1][0]

    @property
    def samples(self) -> int:
        """The number of samples."""
        return sum(count for _, count in self.counts)

    def longer_than(self, length: int) -> int:
        """Return how many samples are longer than ``length``."""
        return sum(count for own, count in self.counts if own > length)


def read_lengths(path: Path) -> Lengths:
    """Read a file with a length in each line; or a histogram, with a length and a number of samples in each line.

    Raises:
        UsageError: the file cannot be read, or a line is neither.
    """
    try:
        lines = path.read_text(encoding="utf-8").splitlines()
    except (OSError, UnicodeDecodeError) as error:
        raise UsageError(f"{path}: cannot be read: {error}") from None
    counts: dict[int, int] = {}
    for number, line in enumerate(lines, 1):
        words = line.replace(",", " ").split()
        if not words:
            continue
        if len(words) > 2 or not all(re.fullmatch("[0-9]{1,9}", word) for word in words) or not int(words[0]):
            raise UsageError(
                f"{path}, line {number}: {line[:40]!r} is not a length, nor a length and a number of samples"
            )
        counts[int(words[0])] = counts.get(int(words[0]), 0) + (int(words[1]) if len(words) > 1 else 1)
    found = tuple(sorted((length, count) for length, count in counts.items() if count))
    if not found:
        raise UsageError(f"{path}: there is no length in it")
    return Lengths(found)
