"""How rows, whose outer products are summed into factors, are read from a layer's input or output gradient."""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn import functional

Dims = tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Rows:
    """How to read rows from a tensor that is reshaped to ``shape``. Each dimension of that shape is in
    exactly one of the other fields."""

    shape: Dims
    groups: Dims
    """The dimensions that count the groups of a grouped layer."""
    features: Dims
    """The dimensions of one row's numbers."""
    samples: Dims
    """The dimensions that count samples."""
    places: Dims
    """The dimensions of a row's position within a sample (pixel, token)."""

    def __call__(self, tensor: Tensor) -> Tensor:
        """Return the tensor as (groups..., features..., samples..., places...), as a view if its strides allow one."""
        return tensor.reshape(self.shape).permute(*self.groups, *self.features, *self.samples, *self.places)

    @property
    def sizes(self) -> tuple[int, int, Dims, Dims]:
        """The number of groups, the length of a row, the sizes of the dimensions of samples, and those of the
        positions in a sample."""
        count = [math.prod(self.shape[d] for d in dims) for dims in (self.groups, self.features)]
        samples, places = (tuple(self.shape[d] for d in dims) for dims in (self.samples, self.places))
        return count[0], count[1], samples, places


@dataclass(frozen=True, slots=True)
class Patches:
    """How to read the windows of a convolution's input (batch, channels, *sizes) as rows, one for each position of the
    output. A row has (channels / groups) × (elements of the kernel) numbers."""

    batch: int
    """The entries of the tensor's first dimension."""
    channels: int
    """The channels of all groups."""
    groups: int
    """The groups of the convolution; ``kernel`` and ``dilation`` are its own, too."""
    kernel: Dims
    stride: Dims
    """The stride of the windows; ones for a transposed convolution."""
    dilation: Dims
    padding: tuple[tuple[int, int], ...]
    """The zeros before and after the entries of each spatial dimension; negative to crop."""
    spread: Dims
    """s, if s − 1 zeros are inserted between neighbouring entries: the stride of a transposed convolution, else 1."""
    flipped: bool
    """Whether each window is reversed, as for a transposed convolution."""
    positions: Dims
    """The spatial sizes of the output."""
    per_sample: int = 1
    """How many entries of the batch belong to one sample."""

    def __call__(self, x: Tensor) -> Tensor:
        """Return all windows as (groups, channels / groups, *kernel, samples, per_sample, *positions): a view of the
        input or a padded copy. If ``flipped``, all windows are copied."""
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

    def sums(self, x: Tensor, dtype: torch.dtype) -> Tensor:
        """Return the sum of each sample's windows, (groups, channels / groups, *kernel, samples), in
        ``dtype``, without copying the windows."""
        for at, size in enumerate(x.shape[2:]):
            read = [x[:, :, self._read(at, k, size)].sum(2, dtype=dtype) for k in range(self.kernel[at])]
            x = torch.stack(read[::-1] if self.flipped else read, -1)
        x = x.unflatten(0, (-1, self.per_sample)).sum(1).unflatten(1, (self.groups, -1))
        return x.permute(1, 2, *range(3, x.dim()), 0)

    def _read(self, at: int, k: int, size: int) -> slice:
        """Return the entries of spatial dimension ``at`` that the windows of all output positions read with element
        ``k`` of the kernel. ``size``: the number of entries, without zeros between and around them."""
        stride, spread, count = self.stride[at], self.spread[at], self.positions[at]
        start = k * self.dilation[at] - self.padding[at][0]
        if spread > 1:  # a transposed convolution, whose windows have stride 1
            return slice(max(0, -(-start // spread)), max(0, min(size, -(-(start + count) // spread))))
        first, last = max(0, -(start // stride)), min(count, (size - 1 - start) // stride + 1)
        return slice(start + first * stride, start + (last - 1) * stride + 1 if last > first else 0, stride)

    @property
    def sizes(self) -> tuple[int, int, Dims, Dims]:
        """The number of groups, the length of a row, the sizes of the dimensions of samples, and those of the
        positions in a sample."""
        features = self.channels // self.groups * math.prod(self.kernel)
        return self.groups, features, (self.batch // self.per_sample,), (self.per_sample, *self.positions)


Reading = Rows | Patches
