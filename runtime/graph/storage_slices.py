"""How a tensor lies in its storage: all of it, or every period a run of numbers (a slice, whatever it is called)."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch


@dataclass(frozen=True, slots=True, order=True)
class Band:
    """The numbers ``start`` .. ``start + length`` of every ``period`` of a storage, in elements.

    A slice of a dense tensor along any dimension is a band, by whatever calls it came about (chunk, split, narrow, a
    reshape and a selection, every other channel), permuted or not.
    """

    period: int
    start: int
    length: int

    @property
    def whole(self) -> bool:
        """Whether it is all of the storage."""
        return self.length == self.period

    def holds(self, other: Band) -> bool:
        """Whether another band of the same period lies within."""
        return (
            self.period == other.period
            and self.start <= other.start
            and other.start + other.length <= self.start + self.length
        )


def band(tensor: torch.Tensor) -> Band | None:
    """The band that a tensor covers in its storage, each number once, or None if it covers no band."""
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


def lies_so(tensor: torch.Tensor, strides: Sequence[int]) -> bool:
    """Whether a tensor has these strides; that of a dimension of 1 says nothing."""
    return all(n == 1 or a == b for n, a, b in zip(tensor.shape, tensor.stride(), strides, strict=True))


def bands_tile(bands: list[Band]) -> bool:
    """Whether bands of one period cover all of it, each number once."""
    at = 0
    for one in sorted(bands):
        if one.period != bands[0].period or one.start != at:
            return False
        at += one.length
    return bool(bands) and at == bands[0].period


def within(tensor: torch.Tensor, part: Band) -> tuple[tuple[int, ...], tuple[int, ...], int]:
    """Size, stride and offset that a view inside a band has in a dense storage that holds that band alone."""
    stride = tuple(s if s < part.period else s // part.period * part.length for s in tensor.stride())
    return tuple(tensor.shape), stride, int(tensor.storage_offset()) - part.start
