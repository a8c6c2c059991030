"""How the rows of a layer's input or gradient are read from the tensor that holds them."""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn import functional

Dims = tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Rows:
    """How to read rows from a tensor: as a view of shape ``shape``, each dimension of which is listed in exactly one
    of the other fields.

    ``groups``: the dimensions of separate blocks. ``features``: those of the numbers of a row. ``samples``: those
    that count samples. ``places``: those of the position of a row within a sample (pixel, token).
    """

    shape: Dims
    groups: Dims
    features: Dims
    samples: Dims
    places: Dims

    def __call__(self, tensor: Tensor) -> Tensor:
        """Return a view of a tensor, of shape (groups..., features..., samples..., places...)."""
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
    """How to read rows from the input of a convolution, a tensor (batch, channels, *sizes): for each position of the
    output, the row is the window that it reads, of channels / groups × kernel numbers.

    ``batch``, ``channels``: of the tensor. ``groups``, ``kernel``, ``stride``, ``dilation``: of the convolution.
    ``padding``: before and after each spatial size; negative to crop. ``spread``: for a transposed convolution its
    stride, between whose inputs there are spread − 1 zeros; else ones. ``flipped``: whether the windows are reversed,
    as for a transposed convolution. ``positions``: the spatial sizes of the output. ``per_sample``: how many entries
    of the batch belong to one sample.
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
        """Return all rows as a view of a padded copy of the input, of shape (groups, channels / groups, *kernel,
        samples, per_sample, *positions)."""
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
        """Return, for each sample, the sum over its rows, of shape (groups, channels / groups, *kernel, samples), in
        the type ``dtype``.

        A window is a product of intervals, so one dimension is summed after the other, without a copy of the windows.
        """
        for at, size in enumerate(x.shape[2:]):
            read = [x[:, :, self._read(at, k, size)].sum(2, dtype=dtype) for k in range(self.kernel[at])]
            x = torch.stack(read[::-1] if self.flipped else read, -1)
        x = x.unflatten(0, (-1, self.per_sample)).sum(1).unflatten(1, (self.groups, -1))
        return x.permute(1, 2, *range(3, x.dim()), 0)

    def _read(self, at: int, k: int, size: int) -> slice:
        """Return which of the ``size`` entries of spatial dimension ``at`` all windows together read at kernel position
        ``k``.
        """
        stride, spread, count = self.stride[at], self.spread[at], self.positions[at]
        start = k * self.dilation[at] - self.padding[at][0]
        if spread > 1:  # a transposed convolution, whose windows have stride 1
            return slice(max(0, -(-start // spread)), max(0, min(size, -(-(start + count) // spread))))
        first, last = max(0, -(start // stride)), min(count, (size - 1 - start) // stride + 1)
        return slice(start + first * stride, start + (last - 1) * stride + 1 if last > first else 0, stride)

    @property
    def sizes(self) -> tuple[int, int, Dims, Dims]:
        """The number of groups, the number of features, and the sizes of the row dimensions (samples,
        places)."""
        features = self.channels // self.groups * math.prod(self.kernel)
        return self.groups, features, (self.batch // self.per_sample,), (self.per_sample, *self.positions)


Reading = Rows | Patches
