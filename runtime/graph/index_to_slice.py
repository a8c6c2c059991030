"""Recognition of index tensors that select a slice: evenly spaced, ascending indices along one dimension."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np


@dataclass(frozen=True, slots=True)
class Slice:
    """A slice of one dimension: every ``step``-th index of dimension ``dim`` from ``start`` to ``end`` (exclusive)."""

    dim: int
    start: int
    end: int
    step: int


def picked_slice(indices: Sequence[np.ndarray[Any, Any] | None], shape: Sequence[int]) -> Slice | None:
    """Return the slice with the same elements in the same order as ``x[indices]`` for an ``x`` of ``shape``, or None.
    None also for empty, boolean or out-of-range arrays, for one array of several dimensions, and for several that need
    broadcasting or skip leading dimensions. An index of None selects a whole dimension; negative indices count from the
    end."""
    present = {k: one for k, one in enumerate(indices) if one is not None}
    if not present or not all(one.dtype.kind in "iu" and one.size for one in present.values()):
        return None
    lists = {k: np.where(one < 0, one + shape[k], one).astype(np.int64) for k, one in present.items()}
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
    """Return the indices ``picked`` of dimension ``dim`` as a slice, if they ascend by equal steps; else None."""
    start, count = int(picked[0]), picked.size
    step = int(picked[1]) - start if count > 1 else 1
    if step < 1 or not np.array_equal(picked, start + step * np.arange(count)):
        return None
    return Slice(dim, start, int(picked[-1]) + 1, step)


def _goes_through(found: Slice, shape: Sequence[int], lists: Sequence[np.ndarray[Any, Any]]) -> bool:
    """Return whether the index arrays ``lists``, one a dimension, enumerate the slice ``found`` of a tensor's first
    dimensions, of sizes ``shape``, in row-major order."""
    ranges = [np.arange(n) for n in shape]
    ranges[found.dim] = ranges[found.dim][found.start : found.end : found.step]
    grid = np.meshgrid(*ranges, indexing="ij")
    return all(np.array_equal(g.reshape(-1), one.reshape(-1)) for g, one in zip(grid, lists, strict=True))
