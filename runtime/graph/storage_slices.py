"""How a tensor covers its storage: entirely, or as a band, the same range of every period."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch


@dataclass(frozen=True, slots=True, order=True)
class Band:
    """Elements ``start`` to ``start + length`` (exclusive) of every ``period`` elements of a storage.

    A slice of a dense tensor along any dimension is a band, whichever calls produced it (chunk, split,
    narrow, reshape and select, every other channel), permuted or not.
    """

    period: int
    start: int
    length: int

    @property
    def whole(self) -> bool:
        """Whether the band covers the whole storage."""
        return self.length == self.period

    def holds(self, other: Band) -> bool:
        """Return whether this band contains all elements of another band of the same period; false if the periods
        differ."""
        return (
            self.period == other.period
            and self.start <= other.start
            and other.start + other.length <= self.start + self.length
        )


def band(tensor: torch.Tensor) -> Band | None:
    """Return the band of its storage that a tensor covers. None if the tensor's elements are no band, repeat an
    element, or are none."""
    elements = tensor.untyped_storage().nbytes() // tensor.element_size()
    dims = sorted(
        (stride, size) for size, stride in zip(tensor.shape, tensor.stride(), strict=True) if size != 1
    )
    length = 1
    while dims and dims[0][0] == length:
        length *= dims.pop(0)[1]
    period = dims[0][0] if dims else elements
    covered = period
    for stride, size in dims:
        if stride != covered:
            return None
        covered *= size
    start = int(tensor.storage_offset())
    if not length or covered != elements or start + length > period:
        return None
    return Band(period, start, length)


def has_strides(tensor: torch.Tensor, strides: Sequence[int]) -> bool:
    """Return whether the strides of a tensor equal ``strides``, ignoring those of dimensions of size 1."""
    return all(n == 1 or a == b for n, a, b in zip(tensor.shape, tensor.stride(), strides, strict=True))


def bands_tile(bands: list[Band]) -> bool:
    """Return whether these bands have the same period and together cover each period, every element once; false
    without bands."""
    at = 0
    for one in sorted(bands):
        if one.period != bands[0].period or one.start != at:
            return False
        at += one.length
    return bool(bands) and at == bands[0].period


def within(tensor: torch.Tensor, part: Band) -> tuple[tuple[int, ...], tuple[int, ...], int]:
    """Return the shape, strides and offset, in elements, that ``tensor`` has in a new dense storage to which
    only the band ``part`` of its storage is copied.

    Args:
        tensor: a view whose elements are all in ``part``.
        part: a band of the storage of ``tensor``.
    """
    stride = tuple(s if s < part.period else s // part.period * part.length for s in tensor.stride())
    return tuple(tensor.shape), stride, int(tensor.storage_offset()) - part.start
