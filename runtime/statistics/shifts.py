"""Sums of outer products of a convolution's windows, from products of its input with shifted copies of itself.

If windows have stride 1, the entry of Σ r rᵀ for the kernel positions k and k' is Σ_p x[p + k] x[p + k']ᵀ: up to the
border it depends on the shift k' − k only. A kernel of 3 × 3 has 81 pairs of positions (45 up to symmetry) and 13
shifts up to symmetry. So the products of the whole input with its shifts are computed once, and for each pair those
rows and columns at the border are subtracted that its windows do not read. The windows are never copied.
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
"""The time of a further product, as the time of so many rows: the result is read and written."""
ROWS_OF_AN_ENTRY = 40
"""The time to add a product to the packed matrix, likewise."""
LEAST_GAIN = 1.5
"""Shifts are used if windows need so many times as many operations."""


@dataclass(frozen=True)
class Term:
    """One product from which sums over a convolution's windows are computed: Σ_q x[q] x[q + shift]ᵀ over a box of
    positions q of the input x.

    ``shift``: the shift along each spatial dimension. ``box``: for each spatial dimension, the interval of positions
    q (end excluded), of which x has both q and q + shift. ``whole``: whether these are all such positions.
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
        """For each pair of kernel positions, by their indices (the first not above the second): the terms whose sum,
        with the signs given, is the entry of Σ r rᵀ for that pair. Empty if one of the two positions is always in the
        padding."""
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
        """All terms of all pairs of kernel positions, each once."""
        return tuple(dict.fromkeys(term for terms in self.pairs.values() for term, _ in terms))

    @cached_property
    def padded(self) -> tuple[int, ...]:
        """The spatial sizes of the input with zeros after each dimension, so that every shift along one dimension is
        a shift of the flattened input."""
        read = self.read
        return tuple(s + d * (k - 1) for s, d, k in zip(self.sizes, read.dilation, read.kernel, strict=True))

    @property
    def rows(self) -> float:
        """The number of rows that the products of all terms read, for one entry of the batch. (A whole term reads
        padding, too.)"""
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
        """Compute all terms over some entries of the batch, and add them to ``into``.

        Args:
            x: these entries, (batch, channels, *sizes).
            into: the terms so far, changed in place: each is (groups, channels / groups, channels / groups).
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
        """Return the input, padded, as (groups, channels / groups, positions), and the flat distance of neighbours in
        each spatial dimension.
        """
        batch, channels, last = x.shape[0], x.shape[1], x.stride(1) == 1
        flat = x.new_zeros((batch, *self.padded, channels) if last else (channels, batch, *self.padded))
        view = flat.movedim(-1, 1) if last else flat.transpose(0, 1)
        view[(slice(None), slice(None), *(slice(size) for size in self.sizes))] = x
        rows = flat.view(-1, channels).mT if last else flat.view(channels, -1)
        steps = tuple(math.prod(self.padded[at + 1 :]) for at in range(len(self.padded)))
        return rows.view(self.read.groups, -1, rows.shape[1]), steps

    def _boxed(self, x: Tensor, term: Term, moved: bool) -> Tensor:
        """Return the input at the positions of a term's box, or, if ``moved``, at these positions plus the term's
        shift, as (groups, channels / groups, positions)."""
        by = term.shift if moved else (0,) * len(term.shift)
        at = tuple(slice(a + s, b + s) for (a, b), s in zip(term.box, by, strict=True))
        rows: Tensor = x[(slice(None), slice(None), *at)].transpose(0, 1).flatten(1)
        return rows.view(self.read.groups, -1, rows.shape[1])

    def add(self, terms: Mapping[Term, Tensor], out: Tensor, scale: float) -> None:
        """Add the sum of the windows' outer products to packed matrices.

        Args:
            terms: all terms, summed over the batch.
            out: the packed matrices, (groups, `packing.packed_size`), changed in place.
            scale: a factor of the sum.
        """
        count = math.prod(self.read.kernel)
        for (one, other), own in self.pairs.items():
            if not own:
                continue
            (first, _), *rest = own
            entry = terms[first]
            if rest:
                entry = entry.clone()
            for term, sign in rest:
                entry.add_(terms[term], alpha=sign)
            if self.read.flipped:
                one, other = count - 1 - one, count - 1 - other
            _add_entry(out, entry, one, other, count, scale)
            if one != other:
                _add_entry(out, entry.mT, other, one, count, scale)


def _add_entry(out: Tensor, entry: Tensor, row: int, column: int, count: int, scale: float) -> None:
    """Add the matrix of the kernel positions ``row`` and ``column``, of ``count``, to packed matrices of features
    (channel, kernel position).
    """
    features = entry.shape[-1] * count
    for start, end, offset in block_columns(features):
        block = block_column(out, features, start, end, offset)
        top, left, right = (
            max(0, -((at - own) // -count)) for at, own in ((start, row), (start, column), (end, column))
        )
        if left < right:
            part = block[:, top * count + row - start :: count, left * count + column - start :: count]
            part.add_(entry[:, top:, left:right], alpha=scale)


@functools.lru_cache(maxsize=1024)
def shifts_of(read: Patches, itemsize: int, most_bytes: int) -> Shifts | None:
    """Return how to sum outer products of windows by shifts of the input, if that is estimated to take less time than
    products of the windows; else None.

    Args:
        read: how the windows are read from the input.
        itemsize: the bytes of a number.
        most_bytes: a bound of the bytes of all terms.
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
