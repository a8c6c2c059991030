"""The op that computes one Kronecker factor: it sums outer products of a tensor's rows, read in chunks, into
packed symmetric matrices."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal

import torch
from torch import Tensor

from rematplan.runtime.split.axis_spans import AxisSpan, Shape, through_view
from rematplan.runtime.statistics.packing import block_column, block_columns, packed_size
from rematplan.runtime.statistics.reading import Patches, Reading
from rematplan.runtime.statistics.shifts import Shifts, Term, shifts_of

CHUNK_BYTES = 2**24
"""The largest number of bytes of rows that are copied at once, unless one sample has more."""
GOLDEN = (5**0.5 - 1) / 2


@dataclass(frozen=True, slots=True)
class Gram:
    """The sum Σ r rᵀ over rows r of a tensor, for each group of a grouped layer: packed matrices (groups,
    `packed_size`), in float32 or wider."""

    read: Reading
    """How rows are read from the tensor."""
    places: Literal["each", "mean", "sum"]
    """With ``each``, every position of a sample (pixel, token) is a row. With ``mean`` or ``sum``, a sample
    is one row."""
    share: float
    """The share of the rows that are used, at most 1."""
    ones: bool
    """Whether a one is appended to each row, for a layer with a bias."""
    scale: float
    """The factor by which the sum is multiplied."""
    diagonal: bool = False
    """Whether only the diagonal of each matrix is computed; the result then has the shape (groups, `size`)."""

    @property
    def size(self) -> int:
        """The number of rows, and of columns, of each summed matrix, including the appended one."""
        return self.read.sizes[1] + self.ones

    @property
    def shape(self) -> tuple[int, int]:
        """The result's shape: the number of groups, and how many numbers are stored for the matrix of one group."""
        groups, features, _, _ = self.read.sizes
        return groups, self.size if self.diagonal else packed_size(features, self.ones)

    @property
    def all_rows(self) -> int:
        """The number of rows that the tensor has. Unless ``share`` is 1, only some of them are used."""
        _, _, samples, places = self.read.sizes
        return math.prod(samples) * (math.prod(places) if self.places == "each" else 1)

    def rows(self, dtype: torch.dtype) -> int:
        """Return the number of rows that are used of a tensor of type ``dtype``."""
        # The share is rounded for each chunk, and the type decides how large chunks are.
        per_sample = self.all_rows // max(1, self.read.sizes[2][0])
        return sum(_taken(per_sample * n, self.share) for _, n in self._chunks(dtype))

    @property
    def flops(self) -> float:
        """The arithmetic operations of one call, for the roofline model."""
        groups, features, _, _ = self.read.sizes
        if shifts := self._shifts(torch.float32):
            channels = features // math.prod(shifts.read.kernel)
            return float(2 * groups * channels**2 * shifts.rows * shifts.read.batch)
        return float(groups * features * (1 if self.diagonal else features) * self.all_rows * self.share)

    def _shifts(self, dtype: torch.dtype) -> Shifts | None:
        """Return how to sum a convolution's windows by shifted copies of its input, or None if the rows
        themselves are to be multiplied."""
        if isinstance(self.read, Patches) and self.places == "each" and self.share == 1 and not self.diagonal:
            return shifts_of(self.read, sum_type(dtype).itemsize, CHUNK_BYTES)
        return None

    def of_rows(self, shape: Shape, span: AxisSpan, indices: int, count: int) -> Gram | None:
        """Return the op for a part of a tensor: ``count`` of its ``indices`` entries along an axis. None if the whole
        sum is not that of all parts. ``shape``: of the whole tensor. ``span``: where it has the axis."""
        if self.share < 1:
            return None
        if isinstance(self.read, Patches):
            return (
                replace(self, read=replace(self.read, batch=count * self.read.batch // indices))
                if span.first == span.last == 0 and self.read.per_sample == 1
                else None
            )
        found = through_view(shape, self.read.shape, span, indices)
        kept = (*self.read.samples, *(self.read.places if self.places == "each" else ()))
        if found is None or not set(range(found.first, found.last + 1)) <= set(kept):
            return None
        return replace(self, read=replace(self.read, shape=found.of_part(self.read.shape, count)))

    def __call__(self, *given: Tensor) -> Tensor:
        """Return the packed sum over the rows of the last tensor. If two are given, add that sum to the first in place,
        and return the first."""
        tensor, previous = given[-1], given[0] if len(given) > 1 else None
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
        """Add to ``out``, in place, the sum over all windows of a convolution's input, computed in ``dtype``
        from shifted copies of the input."""
        terms: dict[Term, Tensor] = {}
        for some in tensor.split(shifts.entries(CHUNK_BYTES, dtype.itemsize)):
            shifts.products(some.to(dtype), terms)
        shifts.add(terms, out, self.scale)
        if self.ones:
            sums = shifts.read.sums(tensor, dtype).sum(-1).flatten(1)
            self._add_border(out, sums, self.all_rows)

    def _rows(self, tensor: Tensor, start: int, count: int, dtype: torch.dtype) -> Tensor:
        """Return the rows of ``count`` samples from ``start``, as (groups, features, rows) in ``dtype``: one for each
        position, or by `places` one for each sample. If ``share`` is below 1, select that share."""
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
        """Add the scaled sum Σ r rᵀ over ``rows``, (groups, features, rows), to ``out``. If ``kept`` is
        false, overwrite ``out``."""
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
        """Add to the last row and column of ``out``, in place, the scaled products of ``count`` rows with the appended
        one. ``sums``: the sum of the rows without that one, (groups, features)."""
        border = out[:, -sums.shape[1] - 1 :]
        border[:, :-1].add_(sums, alpha=self.scale)
        border[:, -1] += self.scale * count

    def _chunks(self, dtype: torch.dtype) -> Iterator[tuple[int, int]]:
        """Yield the ranges of samples whose rows are read at once, as first sample and number of samples."""
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
        # Everything its cost depends on: its key in a profile. A new algorithm needs a new name, since workspaces and
        # times that were measured before are kept on disk.
        how = "shifts of rows" if self._shifts(torch.float32) else "rows" if self.places == "each" else "sums"
        more = f"{self.places} {self.share} {self.ones} {self.scale != 1} {self.diagonal}"
        return f"statistics.gram by {how} {self.read} {more}"

    @property
    def source_name(self) -> str:
        """The name under which this op is called in the generated code of a compiled plan."""
        return "statistics_gram"


def sum_type(dtype: torch.dtype) -> torch.dtype:
    """Return the type in which products of ``dtype`` are summed: float32, or ``dtype`` if that is wider."""
    return torch.promote_types(dtype, torch.float32)


def _taken(rows: int, share: float) -> int:
    return rows if share >= 1 else max(1, math.ceil(rows * share))


def _indices(rows: int, share: float, sizes: Sequence[int], device: torch.device) -> list[Tensor]:
    """Return the indices of the rows that are used, a ``share`` of ``rows``. For each dimension of ``sizes``, they are
    a vector with one entry for each used row."""
    taken = _taken(rows, share)
    at = torch.arange(taken, device=device, dtype=torch.float64)
    # One row of each interval of rows / taken rows. Its position in the interval follows the golden ratio, so
    # that no column of an image is preferred.
    flat = ((at + (at * GOLDEN).frac()) * (rows / taken)).long().clamp_(max=rows - 1)
    found = []
    for size in reversed(sizes):
        found.append(flat % size)
        flat = flat // size
    return found[::-1]
