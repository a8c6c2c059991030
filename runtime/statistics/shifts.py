"""Sums of outer products of a convolution's windows, from products of its input with shifted copies of
itself.

For windows r of stride 1, the entry of Σ r rᵀ for kernel positions k and k' is Σ_p x[p + k] x[p + k']ᵀ.
Except at the border of x it depends on k' − k only: a 3 × 3 kernel has 45 pairs but 13 shifts, up to
symmetry. For each pair, what its windows do not read at the border is subtracted.
"""

from __future__ import annotations

import functools
import itertools
import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import TypeAlias

import torch
from torch import Tensor

from rematplan.runtime.statistics.packing import block_column, block_columns
from rematplan.runtime.statistics.reading import Patches

Interval: TypeAlias = tuple[int, int]

LEAST_CHANNELS = 16
"""For fewer channels of a group, products of windows are faster than many small products."""
ROWS_OF_A_PRODUCT = 48
"""The time to read and write the result of one more product, as the number of rows that a product sums in this time."""
ROWS_OF_AN_ENTRY = 40
"""The time to add a product to the packed matrix, as the number of rows that a product sums in this time."""
LEAST_GAIN = 1.5
"""Products of windows must need at least this many times as many operations, for shifts to be used."""


@dataclass(frozen=True)
class Term:
    """One product from which the sums are computed: Σ_q x[q] x[q + shift]ᵀ over a box of positions q of the input x."""

    shift: tuple[int, ...]
    """The shift along each spatial dimension, in positions."""
    box: tuple[Interval, ...]
    """For each spatial dimension, the interval of q (its end is excluded). Both q and q + shift are positions of x."""
    whole: bool
    """Whether the box has all such q."""


@dataclass(frozen=True)
class Shifts:
    """How to sum outer products of a convolution's windows of stride 1 by products of its input with shifted copies."""

    read: Patches
    """How the windows are read from the input."""

    @cached_property
    def sizes(self) -> tuple[int, ...]:
        """The spatial sizes of the convolution's input, without padding."""
        read = self.read
        ends = zip(read.positions, read.dilation, read.kernel, read.padding, strict=True)
        return tuple(o + d * (k - 1) - sum(pad) for o, d, k, pad in ends)

    @cached_property
    def pairs(self) -> Mapping[tuple[int, int], tuple[tuple[Term, int], ...]]:
        """The products, each with its sign, whose sum is the entry of Σ r rᵀ for two numbered kernel positions, the
        first not above the second. An entry has no products if one of the two positions is always in the padding."""
        positions = list(itertools.product(*map(range, self.read.kernel)))
        found = {}
        for (one, k), (other, to) in itertools.combinations_with_replacement(enumerate(positions), 2):
            found[one, other] = tuple(self._terms(k, to))
        return found

    def _terms(self, k: tuple[int, ...], to: tuple[int, ...]) -> Iterator[tuple[Term, int]]:
        """Yield the products, each with its sign, that sum to the entry of Σ r rᵀ for kernel positions ``k`` and
        ``to``. Borders are subtracted by inclusion and exclusion. There are none if one position is always in the
        padding."""
        read = self.read
        shift = tuple(d * (b - a) for a, b, d in zip(k, to, read.dilation, strict=True))
        choices: list[list[tuple[Interval, int]]] = []
        for at, size in enumerate(self.sizes):
            low, high = max(0, -shift[at]), min(size, size - shift[at])
            start = k[at] * read.dilation[at] - read.padding[at][0]
            first, last = max(low, start), min(high, start + read.positions[at])
            if first >= last:
                return  # one of the two positions is always in the padding
            outside = [(one, -1) for one in ((low, first), (last, high)) if one[0] < one[1]]
            choices.append([((low, high), 1), *outside])
        for chosen in itertools.product(*choices):
            whole = all(sign > 0 for _, sign in chosen)
            yield Term(shift, tuple(box for box, _ in chosen), whole), math.prod(sign for _, sign in chosen)

    @cached_property
    def terms(self) -> tuple[Term, ...]:
        """The distinct products that all entries of Σ r rᵀ need."""
        return tuple(dict.fromkeys(term for terms in self.pairs.values() for term, _ in terms))

    @cached_property
    def padded(self) -> tuple[int, ...]:
        """The spatial sizes of the input after zeros are appended along each dimension. A shift is then a
        shift of the flattened input."""
        read = self.read
        return tuple(s + d * (k - 1) for s, d, k in zip(self.sizes, read.dilation, read.kernel, strict=True))

    @property
    def rows(self) -> float:
        """The cost of all products for one entry of the batch: the positions over which they sum, with padding."""
        boxes = (math.prod(b - a for a, b in term.box) for term in self.terms if not term.whole)
        return sum(boxes) + sum(term.whole for term in self.terms) * math.prod(self.padded)

    def entries(self, most_bytes: int, itemsize: int) -> int:
        """Return how many entries of the batch are processed at once, at least one. Their padded copy has at
        most ``most_bytes`` if one fits."""
        return max(1, most_bytes // (self.read.channels * math.prod(self.padded) * itemsize))

    def products(self, x: Tensor, into: dict[Term, Tensor]) -> None:
        """Add the products of the input (batch, channels, *sizes) with its shifted copies to ``into``, in place. A
        product has the shape (groups, channels / groups, channels / groups)."""
        flat, steps = self._flat(x)
        for term in self.terms:
            if term.whole:
                shift = sum(s * step for s, step in zip(term.shift, steps, strict=True))
                left, right = flat[..., : flat.shape[-1] - shift], flat[..., shift:]
            else:
                left, right = (self._boxed(x, term, moved) for moved in (False, True))
            if term not in into:
                into[term] = torch.bmm(left, right.mT)
            else:
                into[term].baddbmm_(left, right.mT)

    def _flat(self, x: Tensor) -> tuple[Tensor, tuple[int, ...]]:
        """Return the padded input as (groups, channels / groups, positions), and the distance of neighbours
        along each spatial dimension."""
        batch, channels, last = x.shape[0], x.shape[1], x.stride(1) == 1
        flat = x.new_zeros((batch, *self.padded, channels) if last else (channels, batch, *self.padded))
        view = flat.movedim(-1, 1) if last else flat.transpose(0, 1)
        view[(slice(None), slice(None), *(slice(size) for size in self.sizes))] = x
        rows = flat.view(-1, channels).mT if last else flat.view(channels, -1)
        steps = tuple(math.prod(self.padded[at + 1 :]) for at in range(len(self.padded)))
        return rows.view(self.read.groups, -1, rows.shape[1]), steps

    def _boxed(self, x: Tensor, term: Term, moved: bool) -> Tensor:
        """Return the input in the box of ``term``, moved by the term's shift if ``moved``, as (groups,
        channels / groups, positions)."""
        by = term.shift if moved else (0,) * len(term.shift)
        at = tuple(slice(a + s, b + s) for (a, b), s in zip(term.box, by, strict=True))
        rows: Tensor = x[(slice(None), slice(None), *at)].transpose(0, 1).flatten(1)
        return rows.view(self.read.groups, -1, rows.shape[1])

    def add(self, terms: Mapping[Term, Tensor], out: Tensor, scale: float) -> None:
        """Add the sum of the windows' outer products, times ``scale``, to packed matrices ``out`` (groups,
        `packing.packed_size`) in place."""
        groups, channels = self.read.groups, self.read.channels // self.read.groups
        count = math.prod(self.read.kernel)
        for row in range(count):
            entries = out.new_zeros(groups, count, channels, channels)
            for column in range(count):
                self._add_entry(entries[:, column], terms, row, column)
            # The position in the kernel becomes the faster index of the columns: one copy of all entries, since adding
            # each of them with a stride takes several times as long.
            _add_rows(out, entries.permute(0, 2, 3, 1).reshape(groups, channels, -1), row, count, scale)

    def _add_entry(self, entry: Tensor, terms: Mapping[Term, Tensor], row: int, column: int) -> None:
        """Add to ``entry``, in place, the sum for a pair of kernel positions, ``row`` and ``column`` as packed."""
        count = math.prod(self.read.kernel)
        one, other = (count - 1 - k if self.read.flipped else k for k in (row, column))
        for term, sign in self.pairs[min(one, other), max(one, other)]:
            entry.add_(terms[term] if one <= other else terms[term].mT, alpha=sign)


def _add_rows(out: Tensor, rows: Tensor, position: int, count: int, scale: float) -> None:
    """Add to packed matrices, in place, the rows (groups, channels / groups, columns) of one kernel position."""
    for start, end, offset in block_columns(rows.shape[-1]):
        block = block_column(out, rows.shape[-1], start, end, offset)
        # Row number c · count + position belongs to channel c: the position is the faster index.
        top = max(0, -((start - position) // -count))
        block[:, top * count + position - start :: count].add_(rows[:, top:, start:end], alpha=scale)


@functools.lru_cache(maxsize=1024)
def shifts_of(read: Patches, itemsize: int, most_bytes: int) -> Shifts | None:
    """Return how to sum a convolution's windows by shifted copies of its input. None if that is impossible, or not
    estimated `LEAST_GAIN` times as fast, or if the products' results have more than ``most_bytes``. ``itemsize``: bytes
    of a number in them."""
    channels, count = read.channels // read.groups, math.prod(read.kernel)
    if count == 1 or channels < LEAST_CHANNELS or max(*read.stride, *read.spread) > 1:
        return None
    found = Shifts(read)
    if min(found.sizes) < 1 or not found.terms:
        return None
    windows = (count**2 + count) / 2 * math.prod(read.positions) * read.batch
    shifted = found.rows * read.batch + len(found.terms) * ROWS_OF_A_PRODUCT + count**2 * ROWS_OF_AN_ENTRY
    large = read.groups * channels**2 * itemsize * len(found.terms) > most_bytes
    return None if large or LEAST_GAIN * shifted > windows else found
