"""Sums of outer products of a convolution's windows, from products of its input with shifted copies of itself.

Let r be the windows of the input x, with stride 1. The entry of Σ r rᵀ for two positions k and k' in the kernel is Σ_p
x[p + k] x[p + k']ᵀ. Except for the border of x, it depends on the shift k' − k only. A kernel of 3 × 3 has 81 pairs of
positions (45 up to symmetry), but only 13 shifts up to symmetry. So the product of the whole input with each shifted
copy is computed once. For each pair, the rows and columns at the border that its windows do not read are subtracted.
The windows are never copied.
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
    """One product from which sums over a convolution's windows are computed: Σ_q x[q] x[q + shift]ᵀ over a box of
    positions q of the input x.

    ``shift``: the shift along each spatial dimension. ``box``: for each spatial dimension, the interval of q (its end
    is excluded). Both q and q + shift are positions of x. ``whole``: whether the box has all such q.
    """

    shift: tuple[int, ...]
    box: tuple[Interval, ...]
    whole: bool


@dataclass(frozen=True)
class Shifts:
    """How to compute the sum of outer products of a convolution's windows of stride 1 from products of the input with
    shifted copies of itself.

    ``read``: how the windows are read from the input.
    """

    read: Patches

    @cached_property
    def sizes(self) -> tuple[int, ...]:
        """The spatial sizes of the convolution's input, without padding."""
        read = self.read
        ends = zip(read.positions, read.dilation, read.kernel, read.padding, strict=True)
        return tuple(o + d * (k - 1) - sum(pad) for o, d, k, pad in ends)

    @cached_property
    def pairs(self) -> Mapping[tuple[int, int], tuple[tuple[Term, int], ...]]:
        """How to compute each entry of Σ r rᵀ over windows r. An entry is a matrix (channels, channels) for a pair of
        positions in the kernel, which is the key.

        The positions of the kernel are numbered from 0; the first of a pair is not above the second. An entry is a sum
        of products, each multiplied by its sign (1 or −1). It has no products if one of the two positions is always in
        the padding.
        """
        positions = list(itertools.product(*map(range, self.read.kernel)))
        found = {}
        for (one, k), (other, to) in itertools.combinations_with_replacement(enumerate(positions), 2):
            found[one, other] = tuple(self._terms(k, to))
        return found

    def _terms(self, k: tuple[int, ...], to: tuple[int, ...]) -> Iterator[tuple[Term, int]]:
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
        """The products (shifted copies of the input with the input) that are needed for all entries of Σ r rᵀ, each
        once."""
        return tuple(dict.fromkeys(term for terms in self.pairs.values() for term, _ in terms))

    @cached_property
    def padded(self) -> tuple[int, ...]:
        """The spatial sizes of the input if zeros are appended along each dimension. With these zeros, a shift along
        any dimension is a shift of the flattened input."""
        read = self.read
        return tuple(s + d * (k - 1) for s, d, k in zip(self.sizes, read.dilation, read.kernel, strict=True))

    @property
    def rows(self) -> float:
        """The cost of all products for one entry of the batch: the number of positions over which they sum. (A product
        over the whole input includes padding.)"""
        boxes = (math.prod(b - a for a, b in term.box) for term in self.terms if not term.whole)
        return sum(boxes) + sum(term.whole for term in self.terms) * math.prod(self.padded)

    def entries(self, most_bytes: int, itemsize: int) -> int:
        """Return how many entries of the batch are processed at once, so that their padded copy takes at most
        ``most_bytes``; at least one.

        Args:
            most_bytes: the bound, in bytes.
            itemsize: the bytes of a number.
        """
        return max(1, most_bytes // (self.read.channels * math.prod(self.padded) * itemsize))

    def products(self, x: Tensor, into: dict[Term, Tensor]) -> None:
        """Compute all products of the input with its shifted copies for some entries of the batch, and add them to
        ``into``.

        Args:
            x: the input of these entries, (batch, channels, *sizes).
            into: the sum of each product so far, (groups, channels / groups, channels / groups), changed in place.
        """
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
        """Return the input with zeros appended along each spatial dimension, flattened to (groups, channels / groups,
        positions). Also return, for each spatial dimension, the distance of neighbours along it in the flattened
        positions."""
        batch, channels, last = x.shape[0], x.shape[1], x.stride(1) == 1
        flat = x.new_zeros((batch, *self.padded, channels) if last else (channels, batch, *self.padded))
        view = flat.movedim(-1, 1) if last else flat.transpose(0, 1)
        view[(slice(None), slice(None), *(slice(size) for size in self.sizes))] = x
        rows = flat.view(-1, channels).mT if last else flat.view(channels, -1)
        steps = tuple(math.prod(self.padded[at + 1 :]) for at in range(len(self.padded)))
        return rows.view(self.read.groups, -1, rows.shape[1]), steps

    def _boxed(self, x: Tensor, term: Term, moved: bool) -> Tensor:
        """Return the input at the positions of the box of ``term``, as (groups, channels / groups, positions). If
        ``moved``, the positions are those of the box plus the term's shift."""
        by = term.shift if moved else (0,) * len(term.shift)
        at = tuple(slice(a + s, b + s) for (a, b), s in zip(term.box, by, strict=True))
        rows: Tensor = x[(slice(None), slice(None), *at)].transpose(0, 1).flatten(1)
        return rows.view(self.read.groups, -1, rows.shape[1])

    def add(self, terms: Mapping[Term, Tensor], out: Tensor, scale: float) -> None:
        """Add the sum of the windows' outer products to packed matrices.

        Args:
            terms: the products of the input with its shifted copies, summed over the batch.
            out: the packed matrices, (groups, `packing.packed_size`), changed in place.
            scale: a factor of the sum.
        """
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
        """Add to ``entry``, (groups, channels / groups, channels / groups), the sum for one pair of kernel positions.

        Args:
            entry: changed in place.
            terms: the products of the input with its shifted copies, summed over the batch.
            row: the number of the kernel position of the entry's rows, as packed.
            column: that of the entry's columns.
        """
        count = math.prod(self.read.kernel)
        one, other = (count - 1 - k if self.read.flipped else k for k in (row, column))
        for term, sign in self.pairs[min(one, other), max(one, other)]:
            entry.add_(terms[term] if one <= other else terms[term].mT, alpha=sign)


def _add_rows(out: Tensor, rows: Tensor, position: int, count: int, scale: float) -> None:
    """Add to packed matrices, in place, the rows that belong to one kernel position. A row or column of the packed
    matrices belongs to a channel and a kernel position; the position is the faster index.

    Args:
        out: the packed matrices, (groups, `packing.packed_size`).
        rows: (groups, channels / groups, columns), one row for each channel.
        position: the number of the kernel position.
        count: the number of all kernel positions.
        scale: a factor of the rows.
    """
    for start, end, offset in block_columns(rows.shape[-1]):
        block = block_column(out, rows.shape[-1], start, end, offset)
        top = max(0, -((start - position) // -count))
        block[:, top * count + position - start :: count].add_(rows[:, top:, start:end], alpha=scale)


@functools.lru_cache(maxsize=1024)
def shifts_of(read: Patches, itemsize: int, most_bytes: int) -> Shifts | None:
    """Return how to compute the sum of outer products of a convolution's windows from products of the input with
    shifted copies of itself. Return None unless that is possible and estimated to be clearly faster than products of
    the windows.

    Args:
        read: how the windows are read from the input.
        itemsize: the bytes of a number.
        most_bytes: the largest number of bytes that the results of all these products may have.
    """
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
