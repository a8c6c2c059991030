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
from torch.nn import functional

from rematplan.runtime.statistics.packing import block_column, block_columns, packed_size

CHUNK_BYTES = 2**24
"""The largest number of bytes of rows that are copied at once, unless one sample has more."""
GOLDEN = (5**0.5 - 1) / 2

Dims = tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Rows:
    """How to read rows from a tensor: view it in ``shape``; each of its dimensions belongs to ``groups``,
    ``features``, ``samples`` or ``places`` (the position of a row within a sample)."""

    shape: Dims
    groups: Dims
    features: Dims
    samples: Dims
    places: Dims

    def __call__(self, tensor: Tensor) -> Tensor:
        """Return a view of shape (groups..., features..., samples..., places...)."""
        return tensor.reshape(self.shape).permute(*self.groups, *self.features, *self.samples, *self.places)

    @property
    def sizes(self) -> tuple[int, int, Dims, Dims]:
        """The number of groups, the number of features, and the sizes of the row dimensions (samples,
        places)."""
        count = [math.prod(self.shape[d] for d in dims) for dims in (self.groups, self.features)]
        samples, places = (tuple(self.shape[d] for d in dims) for dims in (self.samples, self.places))
        return count[0], count[1], samples, places


@dataclass(frozen=True, slots=True)
class Patches:
    """How to read rows from the input of a convolution (batch, channels, *sizes): for each position of the
    output the window that it reads, of channels / groups × kernel numbers.

    ``padding``: before and after each spatial size; negative to crop. ``spread``: for a transposed
    convolution, its stride: its inputs are spaced with spread − 1 zeros between them. ``flipped``: whether
    the windows are reversed, as for a transposed convolution. ``positions``: the spatial sizes of the output.
    ``per_sample``: how many entries of the batch belong to one sample.
    """

    batch: int
    channels: int
    groups: int
    kernel: Dims
    stride: Dims
    dilation: Dims
    padding: tuple[tuple[int, int], ...]
    spread: Dims
    flipped: bool
    positions: Dims
    per_sample: int = 1

    def __call__(self, x: Tensor) -> Tensor:
        """Return a view of a padded copy, of shape (groups, channels / groups, *kernel, samples, per_sample,
        *positions)."""
        n = len(self.kernel)
        if any(s > 1 for s in self.spread):
            sizes = [(size - 1) * s + 1 for size, s in zip(x.shape[2:], self.spread, strict=True)]
            spread = x.new_zeros((*x.shape[:2], *sizes))
            places = [slice(None), slice(None), *(slice(None, None, s) for s in self.spread)]
            spread[tuple(places)] = x
            x = spread
        if any(p for pair in self.padding for p in pair):
            x = functional.pad(x, [p for pair in reversed(self.padding) for p in pair])
        for at, (k, s, d) in enumerate(zip(self.kernel, self.stride, self.dilation, strict=True)):
            x = x.unfold(2 + at, d * (k - 1) + 1, s)[..., ::d]
        if self.flipped:
            x = x.flip(tuple(range(2 + n, 2 + 2 * n)))
        x = x.unflatten(0, (-1, self.per_sample)).unflatten(2, (self.groups, -1))
        kernel, positions = range(4 + n, 4 + 2 * n), range(4, 4 + n)
        return x.permute(2, 3, *kernel, 0, 1, *positions)

    @property
    def sizes(self) -> tuple[int, int, Dims, Dims]:
        """The number of groups, the number of features, and the sizes of the row dimensions (samples,
        places)."""
        features = self.channels // self.groups * math.prod(self.kernel)
        return self.groups, features, (self.batch // self.per_sample,), (self.per_sample, *self.positions)


Reading = Rows | Patches


@dataclass(frozen=True, slots=True)
class Gram:
    """The sum Σ r rᵀ over rows r of a tensor, in float32 or wider, packed: (groups, `packed_size`).

    ``read``: how rows are read. ``places``: with ``each``, every place is a row; with ``mean`` or ``sum``, a
    sample is one row, the mean or sum over its places. ``share``: the share of the rows that are used.
    ``ones``: whether each row ends with an additional one. ``scale``: a factor of the sum. ``diagonal``:
    whether only the diagonals are computed: (groups, `size`). If it is called with a second tensor, the sum
    of an earlier use of the same weight, it adds to that tensor in place.
    """

    read: Reading
    places: Literal["each", "mean", "sum"]
    share: float
    ones: bool
    scale: float
    diagonal: bool = False

    @property
    def size(self) -> int:
        """The number of rows of the matrix."""
        return self.read.sizes[1] + self.ones

    @property
    def shape(self) -> tuple[int, int]:
        """The result's shape."""
        groups, features, _, _ = self.read.sizes
        return groups, self.size if self.diagonal else packed_size(features, self.ones)

    @property
    def all_rows(self) -> int:
        """The number of rows that the tensor has, of which ``share`` are used."""
        _, _, samples, places = self.read.sizes
        return math.prod(samples) * (math.prod(places) if self.places == "each" else 1)

    def rows(self, dtype: torch.dtype) -> int:
        """Return the number of rows that are used of a tensor of that type."""
        per_sample = self.all_rows // max(1, self.read.sizes[2][0])
        return sum(_taken(per_sample * n, self.share) for _, n in self._chunks(dtype))

    @property
    def flops(self) -> float:
        """The number of arithmetic operations of a call, for the roofline model."""
        groups, features, _, _ = self.read.sizes
        return float(groups * features * (1 if self.diagonal else features) * self.all_rows * self.share)

    def __call__(self, tensor: Tensor, previous: Tensor | None = None) -> Tensor:
        """Return the packed sum, added to ``previous`` if that is given."""
        dtype = sum_type(tensor.dtype)
        out = tensor.new_empty(self.shape, dtype=dtype) if previous is None else previous
        kept = previous is not None
        for start, count in self._chunks(tensor.dtype):
            self._add(out, self._rows(tensor, start, count, dtype), kept)
            kept = True
        return out if kept else out.zero_()

    def _rows(self, tensor: Tensor, start: int, count: int, dtype: torch.dtype) -> Tensor:
        """Return the rows of ``count`` samples, (groups, features, rows)."""
        groups, features, samples, places = self.read.sizes
        if isinstance(self.read, Patches):
            each = self.read.per_sample
            found = self.read(tensor.narrow(0, start * each, count * each))
        else:
            whole = self.read(tensor)
            found = whole.narrow(whole.dim() - len(samples) - len(places), start, count)
        if self.places != "each":
            dims = tuple(range(-len(places), 0))
            if dims:
                found = (found.mean if self.places == "mean" else found.sum)(dims, dtype=dtype)
            places = ()
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
            border = out[:, -features - 1 :]
            if not kept:
                border.zero_()
            border[:, :-1].add_(rows.sum(-1), alpha=self.scale)
            border[:, -1] += self.scale * rows.shape[-1]

    def _chunks(self, dtype: torch.dtype) -> Iterator[tuple[int, int]]:
        """Yield ranges of samples to be read at a time: the first sample and their number."""
        groups, features, samples, places = self.read.sizes
        first = samples[0]
        each = self.all_rows // max(1, first) * self.share
        numbers = groups * features * each
        if isinstance(self.read, Patches):
            numbers += self.read.channels * math.prod(places) * math.prod(self.read.stride)  # padded
        bytes_ = numbers * sum_type(dtype).itemsize
        whole = isinstance(self.read, Rows) and sum_type(dtype) == dtype and not places
        step = first if whole else max(1, min(first, int(CHUNK_BYTES // max(1, bytes_))))
        yield from ((start, min(step, first - start)) for start in range(0, first, max(1, step)))

    def __str__(self) -> str:
        # Everything its cost depends on: its key in a profile.
        return f"statistics.gram {self.read} {self.places} {self.share} {self.ones} {self.scale != 1} {self.diagonal}"

    @property
    def source_name(self) -> str:
        """The function's name in generated source."""
        return "statistics_gram"


def sum_type(dtype: torch.dtype) -> torch.dtype:
    """Return the type in which products of numbers of type ``dtype`` are summed: float32, or ``dtype`` if it is
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
