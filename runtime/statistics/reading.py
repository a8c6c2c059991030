"""How the rows of a layer's input, or of the gradient of its output, are read from a tensor. The outer products of
these rows are summed into Kronecker factors."""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn import functional

Dims = tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Rows:
    """How to read rows from a tensor. The tensor is reshaped to ``shape``; each dimension of that shape is listed in
    exactly one of the other fields.

    ``groups``: the dimensions that count the groups of a grouped layer. ``features``: the dimensions of one row's
    numbers. ``samples``: the dimensions that count samples. ``places``: the dimensions of a row's position within a
    sample (pixel, token).
    """

    shape: Dims
    groups: Dims
    features: Dims
    samples: Dims
    places: Dims

    def __call__(self, tensor: Tensor) -> Tensor:
        """Return the numbers of a tensor in the shape (groups..., features..., samples..., places...), where places are
        positions within a sample. The result is a view if the tensor's strides allow it."""
        return tensor.reshape(self.shape).permute(*self.groups, *self.features, *self.samples, *self.places)

    @property
    def sizes(self) -> tuple[int, int, Dims, Dims]:
        """Four entries: the number of groups; the number of features (the length of a row); the sizes of the dimensions
        that count samples; and the sizes of those that count positions within a sample."""
        count = [math.prod(self.shape[d] for d in dims) for dims in (self.groups, self.features)]
        samples, places = (tuple(self.shape[d] for d in dims) for dims in (self.samples, self.places))
        return count[0], count[1], samples, places


@dataclass(frozen=True, slots=True)
class Patches:
    """How to read rows from the input of a convolution, a tensor (batch, channels, *sizes). There is one row for each
    position of the convolution's output: the window of the input from which the convolution computes the output at this
    position. A row has (channels / groups) × (elements of the kernel) numbers.

    ``batch``, ``channels``: those of the tensor. ``groups``, ``kernel``, ``stride``, ``dilation``: those of the
    convolution; of a transposed convolution, ``stride`` is ones. ``padding``: the zeros before and after the entries of
    each spatial dimension; negative to crop. ``spread``: s, so that s − 1 zeros are inserted between neighbouring
    entries. It is the stride of a transposed convolution; for others it is 1. ``flipped``: whether each window is
    reversed, as for a transposed convolution. ``positions``: the spatial sizes of the output. ``per_sample``: how many
    entries of the batch belong to one sample.
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
        """Return all rows (windows of the input) as a tensor of shape (groups, channels / groups, *kernel, samples,
        per_sample, *positions). It is a view of the input, or of a padded copy; with ``flipped`` it is a copy of all
        windows."""
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
        """Return, for each sample, the sum of its rows (windows of the input), of shape (groups, channels / groups,
        *kernel, samples), in the type ``dtype``.

        The spatial dimensions are summed one after the other, without a copy of the windows: for each element of the
        kernel, the entries that all windows read there form a regular grid.
        """
        for at, size in enumerate(x.shape[2:]):
            read = [x[:, :, self._read(at, k, size)].sum(2, dtype=dtype) for k in range(self.kernel[at])]
            x = torch.stack(read[::-1] if self.flipped else read, -1)
        x = x.unflatten(0, (-1, self.per_sample)).sum(1).unflatten(1, (self.groups, -1))
        return x.permute(1, 2, *range(3, x.dim()), 0)

    def _read(self, at: int, k: int, size: int) -> slice:
        """Return the entries of a spatial dimension from which the windows of all output positions take their element
        ``k``.

        Args:
            at: the spatial dimension.
            k: the element's position in the kernel along this dimension.
            size: the number of entries of the dimension. Zeros between and around the entries do not count.
        """
        stride, spread, count = self.stride[at], self.spread[at], self.positions[at]
        start = k * self.dilation[at] - self.padding[at][0]
        if spread > 1:  # a transposed convolution, whose windows have stride 1
            return slice(max(0, -(-start // spread)), max(0, min(size, -(-(start + count) // spread))))
        first, last = max(0, -(start // stride)), min(count, (size - 1 - start) // stride + 1)
        return slice(start + first * stride, start + (last - 1) * stride + 1 if last > first else 0, stride)

    @property
    def sizes(self) -> tuple[int, int, Dims, Dims]:
        """Four entries: the number of groups; the number of features (the length of a row); the sizes of the dimensions
        that count samples; and the sizes of those that count positions within a sample."""
        features = self.channels // self.groups * math.prod(self.kernel)
        return self.groups, features, (self.batch // self.per_sample,), (self.per_sample, *self.positions)


Reading = Rows | Patches
