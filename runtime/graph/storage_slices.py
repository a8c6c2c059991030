"""The part of a storage that a tensor covers: all of it, or a band, the same range in each of its equal periods."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch


@dataclass(frozen=True, slots=True, order=True)
class Band:
    """The elements ``start`` to ``start + length`` (exclusive) of each period of ``period`` elements of a storage.
    ``x[:, 2:5]`` of a dense ``x`` of shape (8, 10) is the band of period 10, start 2 and length 3, however it was
    made."""

    period: int
    start: int
    length: int

    @property
    def whole(self) -> bool:
        """Whether the band covers the whole storage."""
        return self.length == self.period

    def holds(self, other: Band) -> bool:
        """Return whether this band contains all elements of another band of the same period; False if the periods
        differ."""
        return (
            self.period == other.period
            and self.start <= other.start
            and other.start + other.length <= self.start + self.length
        )


def band(tensor: torch.Tensor) -> Band | None:
    """Return the band whose elements a tensor has, each once, in any order of dimensions; None if there is none, as for
    an empty tensor."""
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


def is_plain(tensor: torch.Tensor) -> bool:
    """Return whether a tensor has exactly the strides of a new contiguous tensor of its shape."""
    # ``is_contiguous`` does not tell: a tensor (N, C, 1, 1) may be channels-last, too, and kernels choose
    # layouts by the strides of size 1.
    expected = 1
    for size, stride in zip(reversed(tensor.shape), reversed(tensor.stride()), strict=True):
        if stride != expected:
            return False
        expected *= max(size, 1)
    return True


def is_dense(tensor: torch.Tensor) -> bool:
    """Return whether a tensor's elements fill a range of memory, each once. One without elements is dense."""
    expected = 1
    for stride, size in sorted(zip(tensor.stride(), tensor.shape, strict=True)):
        if size != 1 and stride != expected:
            return not tensor.numel()
        expected *= size
    return True


def bands_tile(bands: list[Band]) -> bool:
    """Return whether these bands have the same period and together cover every element of the period exactly once.
    Return False for an empty list."""
    at = 0
    for one in sorted(bands):
        if one.period != bands[0].period or one.start != at:
            return False
        at += one.length
    return bool(bands) and at == bands[0].period


def within(tensor: torch.Tensor, part: Band) -> tuple[tuple[int, ...], tuple[int, ...], int]:
    """Return ``tensor``'s shape, stride and offset after its band ``part`` is copied to a new dense storage."""
    stride = tuple(s if s < part.period else s // part.period * part.length for s in tensor.stride())
    return tuple(tensor.shape), stride, int(tensor.storage_offset()) - part.start


def uninitialised_like(tensor: torch.Tensor) -> torch.Tensor:
    """Return a new tensor, fake in a fake mode, with the type, shape, strides, offset and storage size of another."""
    size = tensor.untyped_storage().nbytes() // tensor.element_size()
    storage = torch.empty(size, dtype=tensor.dtype, device=tensor.device)
    shape, stride = tuple(map(int, tensor.shape)), tuple(map(int, tensor.stride()))
    return storage.as_strided(shape, stride, int(tensor.storage_offset()))
