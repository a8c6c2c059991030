"""The op of a statistic: the sum of outer products of a tensor's rows, as packed symmetric matrices.

Rows are read in chunks, so that copies (patches of a convolution, float32 of bfloat16) stay small.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import Tensor

from rematplan.runtime.statistics.packing import block_column, block_columns, packed_size
from rematplan.runtime.statistics.reading import Patches, Reading
from rematplan.runtime.statistics.shifts import Shifts, Term, shifts_of

CHUNK_BYTES = 2**24
"""The largest number of bytes of rows that are copied at once, unless one sample has more."""
GOLDEN = (5**0.5 - 1) / 2


@dataclass(frozen=True, slots=True)
class Gram:
    """The op of a statistic: the sum Σ r rᵀ over rows r of a tensor, in float32 or wider, as packed symmetric
    matrices (groups, `packed_size`).

    ``read``: how rows are read. ``places``: with ``each``, every place of a sample is a row; with ``mean`` or
    ``sum``, a sample is one row, the mean or sum over its places. ``share``: the share of the rows that are used.
    ``ones``: whether each row ends with an additional one, for a bias. ``scale``: a factor of the sum. ``diagonal``:
    whether only the diagonals are computed: (groups, `size`).
    """

    read: Reading
    places: Literal["each", "mean", "sum"]
    share: float
    ones: bool
    scale: float
    diagonal: bool = False

    @property
    def size(self) -> int:
        """The number of rows of each matrix: the features, and one more with ``ones``."""
        return self.read.sizes[1] + self.ones

    @property
    def shape(self) -> tuple[int, int]:
        """The result's shape: (groups, numbers stored for a matrix)."""
        groups, features, _, _ = self.read.sizes
        return groups, self.size if self.diagonal else packed_size(features, self.ones)

    @property
    def all_rows(self) -> int:
        """The number of rows that the tensor has, whether or not they are used."""
        _, _, samples, places = self.read.sizes
        return math.prod(samples) * (math.prod(places) if self.places == "each" else 1)

    def rows(self, dtype: torch.dtype) -> int:
        """Return the number of rows that are used of a tensor whose elements have this type. (It depends on the type,
        since rows are read in chunks of limited bytes, and some are selected of each chunk.)"""
        per_sample = self.all_rows // max(1, self.read.sizes[2][0])
        return sum(_taken(per_sample * n, self.share) for _, n in self._chunks(dtype))

    @property
    def flops(self) -> float:
        """The number of arithmetic operations of a call, for the roofline model: of the products of rows; or of the
        products of shifted inputs, where these are used for a convolution (`shifts_of`)."""
        groups, features, _, _ = self.read.sizes
        if shifts := self._shifts(torch.float32):
            channels = features // math.prod(shifts.read.kernel)
            return float(2 * groups * channels**2 * shifts.rows * shifts.read.batch)
        return float(groups * features * (1 if self.diagonal else features) * self.all_rows * self.share)

    def _shifts(self, dtype: torch.dtype) -> Shifts | None:
        """Return how to sum the rows of a tensor of that type by products of its shifts; None if the rows themselves
        are multiplied."""
        if isinstance(self.read, Patches) and self.places == "each" and self.share == 1 and not self.diagonal:
            return shifts_of(self.read, sum_type(dtype).itemsize, CHUNK_BYTES)
        return None

    def __call__(self, tensor: Tensor, previous: Tensor | None = None) -> Tensor:
        """Return the packed sum over the rows of ``tensor``. If ``previous`` is given (the sum of an earlier use of
        the same weight), the sum is added to that tensor in place, and that tensor is returned."""
        dtype = sum_type(tensor.dtype)
        out = tensor.new_empty(self.shape, dtype=dtype) if previous is None else previous
        kept = previous is not None
        if shifts := self._shifts(tensor.dtype):
            self._add_by_shifts(shifts, out if kept else out.zero_(), tensor, dtype)
            return out
        for start, count in self._chunks(tensor.dtype):
            self._add(out, self._rows(tensor, start, count, dtype), kept)
            kept = True
        return out if kept else out.zero_()

    def _add_by_shifts(self, shifts: Shifts, out: Tensor, tensor: Tensor, dtype: torch.dtype) -> None:
        """Add the sum over all rows to ``out``."""
        terms: dict[Term, Tensor] = {}
        for some in tensor.split(shifts.entries(CHUNK_BYTES, dtype.itemsize)):
            shifts.products(some.to(dtype), terms)
        shifts.add(terms, out, self.scale)
        if self.ones:
            sums = shifts.read.sums(tensor, dtype).sum(-1).flatten(1)
            self._add_border(out, sums, self.all_rows)

    def _rows(self, tensor: Tensor, start: int, count: int, dtype: torch.dtype) -> Tensor:
        """Return the rows of ``count`` samples, (groups, features, rows)."""
        groups, features, samples, places = self.read.sizes
        each = self.places == "each"
        if isinstance(self.read, Patches):
            per = self.read.per_sample
            part = tensor.narrow(0, start * per, count * per)
            found = self.read(part) if each else self.read.sums(part, dtype)
        else:
            whole = self.read(tensor)
            found = whole.narrow(whole.dim() - len(samples) - len(places), start, count)
            if places and not each:
                found = found.sum(tuple(range(-len(places), 0)), dtype=dtype)
        if self.places == "mean" and places:
            found = found / math.prod(places)
        places = places if each else ()
        row_sizes = (count, *samples[1:], *places)
        if self.share < 1:
            taken = _indices(math.prod(row_sizes), self.share, row_sizes, tensor.device)
            where: list[Any] = [slice(None)] * (found.dim() - len(taken))
            found = found[tuple(where + taken)]
        return found.reshape(groups, features, -1).to(dtype)

    def _add(self, out: Tensor, rows: Tensor, kept: bool) -> None:
        """Add the sum over some rows to ``out``; overwrite ``out`` unless ``kept``."""
        features, beta = rows.shape[1], float(kept)
        if self.diagonal:
            squares = torch.linalg.vector_norm(rows, dim=-1).square_()  # without a tensor of all squares
            if not kept:
                out.zero_()
            out[:, :features].add_(squares, alpha=self.scale)
            out[:, features:] += self.scale * rows.shape[-1]
            return
        for start, end, offset in block_columns(features):
            column = block_column(out, features, start, end, offset)
            left, right = rows[:, start:], rows[:, start:end].mT
            if len(rows) == 1:  # the kernel for one matrix is faster
                column[0].addmm_(left[0], right[0], beta=beta, alpha=self.scale)
            else:
                column.baddbmm_(left, right, beta=beta, alpha=self.scale)
        if self.ones:
            if not kept:
                out[:, -features - 1 :].zero_()
            self._add_border(out, rows.sum(-1), rows.shape[-1])

    def _add_border(self, out: Tensor, sums: Tensor, count: int) -> None:
        """Add the products of ``count`` rows, whose sum is ``sums``, with the input that is one."""
        border = out[:, -sums.shape[1] - 1 :]
        border[:, :-1].add_(sums, alpha=self.scale)
        border[:, -1] += self.scale * count

    def _chunks(self, dtype: torch.dtype) -> Iterator[tuple[int, int]]:
        """Yield ranges of samples to be read at a time: the first sample and their number."""
        groups, features, samples, places = self.read.sizes
        first = samples[0]
        each = self.all_rows // max(1, first) * self.share
        numbers = groups * features * each
        windows = isinstance(self.read, Patches) and max(*self.read.kernel, *self.read.spread) > 1
        if isinstance(self.read, Patches):
            numbers += self.read.channels * math.prod(places) * math.prod(self.read.stride)  # padded
        bytes_ = numbers * sum_type(dtype).itemsize
        step = max(1, min(first, int(CHUNK_BYTES // max(1, bytes_))))
        copied = windows or sum_type(dtype) != dtype
        if not copied and not places:
            step = first
        elif not copied and self.share == 1 and self.places == "each" and math.prod(places) >= features:
            step = 1  # one sample is a matrix without a copy, and larger than the sum
        yield from ((start, min(step, first - start)) for start in range(0, first, max(1, step)))

    def __str__(self) -> str:
        # Everything its cost depends on: its key in a profile.
        how = "shifts" if self._shifts(torch.float32) else "rows" if self.places == "each" else "sums"
        more = f"{self.places} {self.share} {self.ones} {self.scale != 1} {self.diagonal}"
        return f"statistics.gram by {how} {self.read} {more}"

    @property
    def source_name(self) -> str:
        """The function's name in generated source."""
        return "statistics_gram"


def sum_type(dtype: torch.dtype) -> torch.dtype:
    """Return the type in which products of numbers of type ``dtype`` are summed: float32, or ``dtype`` if that is
    wider."""
    return torch.promote_types(dtype, torch.float32)


def _taken(rows: int, share: float) -> int:
    return rows if share >= 1 else max(1, math.ceil(rows * share))


def _indices(rows: int, share: float, sizes: Sequence[int], device: torch.device) -> list[Tensor]:
    """Return the indices of the rows that are used, one array for each row dimension.

    One row is used of each interval of 1 / share rows. Its position in the interval follows multiples of the
    golden ratio, so that no column of an image is preferred.
    """
    taken = _taken(rows, share)
    at = torch.arange(taken, device=device, dtype=torch.float64)
    flat = ((at + (at * GOLDEN).frac()) * (rows / taken)).long().clamp_(max=rows - 1)
    found = []
    for size in reversed(sizes):
        found.append(flat % size)
        flat = flat // size
    return found[::-1]
