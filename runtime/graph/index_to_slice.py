"""Indices that are a slice: at equal distances, rising, and of one dimension all that the others leave open."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np


@dataclass(frozen=True, slots=True)
class Slice:
    """Every ``step``-th of a dimension from ``start`` to ``end``."""

    dim: int
    start: int
    end: int
    step: int


def picked_slice(indices: Sequence[np.ndarray[Any, Any] | None], shape: Sequence[int]) -> Slice | None:
    """The slice of a tensor of that shape that indices of its leading dimensions (None: all of one) pick, in its
    order; None if they pick anything else."""
    given = {k: one for k, one in enumerate(indices) if one is not None}
    if not given or not all(one.dtype.kind in "iu" and one.size for one in given.values()):
        return None
    lists = {k: np.where(one < 0, one + shape[k], one).astype(np.int64) for k, one in given.items()}
    if any(one.min() < 0 or one.max() >= shape[k] for k, one in lists.items()):
        return None
    if len(lists) == 1:
        ((dim, one),) = lists.items()
        return _progression(dim, one) if one.ndim == 1 else None
    if list(lists) != list(range(len(lists))):
        return None
    for dim, one in lists.items():
        found = _progression(dim, np.unique(one))
        if found and _goes_through(found, shape[: len(lists)], list(lists.values())):
            return found
    return None


def _progression(dim: int, picked: np.ndarray[Any, Any]) -> Slice | None:
    """The slice of indices that rise by equal steps."""
    start, count = int(picked[0]), picked.size
    step = int(picked[1]) - start if count > 1 else 1
    if step < 1 or not np.array_equal(picked, start + step * np.arange(count)):
        return None
    return Slice(dim, start, int(picked[-1]) + 1, step)


def _goes_through(found: Slice, shape: Sequence[int], lists: Sequence[np.ndarray[Any, Any]]) -> bool:
    """Whether indices, one list a dimension, go through a slice of these dimensions in order."""
    ranges = [np.arange(n) for n in shape]
    ranges[found.dim] = ranges[found.dim][found.start : found.end : found.step]
    grid = np.meshgrid(*ranges, indexing="ij")
    return all(np.array_equal(g.reshape(-1), one.reshape(-1)) for g, one in zip(grid, lists, strict=True))
