"""One of the two Kronecker factors of a layer: its moving average, its inverse, and how it is inverted."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from rematplan.optim.damped_inverses import (
    INVERSES,
    LOW_RANK_SHARE,
    Inverse,
    cholesky,
    inverse_bytes,
    low_rank_inverse,
    restored,
    saved,
)
from rematplan.optim.nystrom import nystrom
from rematplan.runtime.statistics.packing import pack, packed_size, packed_trace, unpack

AUTO = "auto"
DIAGONAL_ABOVE = 16_384
"""With ``auto``, only the diagonal of a factor with more rows is stored: the matrix and its inverse would take 1.5
GiB."""
LOW_RANK_FROM = 2_048
"""With ``auto``, a factor with fewer rows never gets a low-rank inverse: Cholesky factorisation takes no longer."""
LOW_RANK_BELOW = 16
"""With ``auto``, a factor gets a low-rank inverse if at most rows ÷ 16 of its eigenvalues are above the damping."""
MEASURE_EVERY = 10
"""With ``auto``, the number of eigenvalues above the damping is counted again at every tenth inversion if it was too
high for a low-rank inverse."""
_COUNTS = ("count", "made", "changed", "rank", "trace")
"""The keys of a factor's state whose values are numbers."""


@dataclass
class Factor:
    """One of the two Kronecker factors of a layer, with ``size`` rows: its moving average and its inverse.

    ``blocks``: () for one matrix; (groups,) for a grouped layer, which has one matrix for each group. ``how``: the
    method of inversion, a name of `INVERSES` or ``auto``. ``dtype``: the data type of the average and the inverse.
    ``vector``: whether the statistics contain only the factor's diagonal.

    ``total``: the sum of outer products, in which each step multiplies the earlier sum by a decay. It is stored as a
    packed triangle or as its diagonal. It is None before the first statistics, and if another process stores it.
    ``count``: the number of rows in ``total``, with the same decay, so that ``total`` ÷ ``count`` is a moving average
    without a correction at the start. ``trace``: the trace of ``total``, averaged over the groups, if another process
    stores ``total``; otherwise None.

    ``inverse``: the latest inverse; None before the first inversion, and if this process does not need it. ``made``:
    how often the factor has been inverted. ``changed``: whether ``total`` has changed since the last inversion.
    ``rank``: the number of eigenvalues above the damping, as last counted by the method ``auto``; None if it was never
    counted.
    """

    size: int
    blocks: tuple[int, ...]
    how: str
    dtype: torch.dtype
    vector: bool = False
    total: Tensor | None = None
    count: float = 0.0
    inverse: Inverse | None = None
    made: int = 0
    changed: bool = False
    rank: int | None = None
    trace: float | None = None

    @property
    def diagonal(self) -> bool:
        """Whether only the diagonal of the factor is stored and inverted."""
        large = self.how == AUTO and self.size > DIAGONAL_ABOVE
        return self.vector or large or self.how == "diagonal"

    @property
    def shape(self) -> tuple[int, ...]:
        """The shape of ``total``: (…, size) for a diagonal, otherwise (…, size (size + 1) ÷ 2), a packed triangle.

        A grouped layer has its number of groups as the first dimension.
        """
        return (*self.blocks, self.size if self.diagonal else packed_size(self.size))

    @property
    def cost(self) -> float:
        """The number of operations of an inversion, up to a constant factor: size³ for each matrix, or size for a
        diagonal."""
        return float(torch.Size(self.blocks).numel() * self.size ** (1 if self.diagonal else 3))

    def kept(self, factor: Tensor) -> Tensor:
        """Return the part of new statistics that is added to ``total``: the packed triangle of a symmetric matrix, or
        its diagonal.

        ``factor``: the sum of outer products, (…, size, size), or (…, size) if statistics contain only the diagonal.
        """
        if not self.diagonal:
            return pack(factor.to(self.dtype))
        return (factor if self.vector else factor.diagonal(dim1=-2, dim2=-1)).to(self.dtype)

    def fold(self, kept: Tensor, count: float, decay: float) -> None:
        """Add new statistics to the moving average.

        Args:
            kept: the sum of outer products over ``count`` rows, with the shape of ``total``, as from the method `kept`.
            count: the number of rows.
            decay: the factor by which the earlier sum and its count are multiplied first.
        """
        if self.total is None:
            self.total = torch.zeros_like(kept)
        self.total.mul_(decay).add_(kept)
        self.count = decay * self.count + count
        self.changed = True

    def fold_trace(self, trace: float, count: float, decay: float) -> None:
        """Add the trace of new statistics to ``trace``, in a process that does not store the moving average itself.

        Args:
            trace: the trace of the sum of outer products over ``count`` rows.
            count: the number of rows.
            decay: the factor by which the earlier trace and its count are multiplied first.
        """
        self.trace = decay * (self.trace or 0.0) + trace
        self.count = decay * self.count + count

    def mean(self) -> Tensor:
        """Return the moving average: (…, size, size), or its diagonal (…, size). This process must have statistics."""
        assert self.total is not None
        mean = self.total / self.count
        return mean if self.diagonal else unpack(mean, self.size)

    def trace_of(self, kept: Tensor) -> Tensor:
        """Return the trace of a sum of outer products, averaged over the groups of a grouped layer.

        ``kept``: the sum as a packed triangle or a diagonal, as from the method `kept`.
        """
        return (kept.sum(-1) if self.diagonal else packed_trace(kept, self.size)).mean()

    def mean_eigenvalue(self) -> Tensor | float:
        """Return the trace of the moving average ÷ ``size``, averaged over the groups of a grouped layer."""
        trace = self.trace if self.total is None else self.trace_of(self.total)
        assert trace is not None
        return trace / (self.count * self.size)

    def invert(self, damping: float) -> None:
        """Invert the moving average + ``damping`` I, and store the result in ``inverse``.

        Some methods give an approximation. If a low-rank form is not positive definite, Cholesky factorisation is used
        instead.
        """
        self.inverse = self._inverse(self.mean(), damping)
        self.made, self.changed = self.made + 1, False

    def _inverse(self, mean: Tensor, damping: float) -> Inverse:
        if self.diagonal:
            return INVERSES["diagonal"](mean, damping, None)
        if self.how == AUTO:
            return self._measured(mean, damping) or cholesky(mean, damping)
        return INVERSES[self.how](mean, damping, self.inverse)

    def _measured(self, mean: Tensor, damping: float) -> Inverse | None:
        """Return a low-rank inverse of ``mean`` + ``damping`` I, for the method ``auto``; None if a dense inverse is
        better.

        A dense inverse is better for factors of fewer than 2,048 rows, and if more than rows ÷ 16 eigenvalues are above
        the damping. If there were too many, they are counted again only at every tenth inversion.

        ``mean``: the moving average, (…, size, size).
        """
        few = self.size // LOW_RANK_BELOW
        lately = self.rank is not None and self.rank > few and self.made % MEASURE_EVERY
        if self.size < LOW_RANK_FROM or lately:
            return None
        before = getattr(self.inverse, "basis", None)
        values, basis = nystrom(mean, self.size // LOW_RANK_SHARE, before)
        self.rank = int((values > damping).sum(-1).max())
        return low_rank_inverse(mean, values, basis, damping) if self.rank <= few else None

    def effective_rank(self, damping: float) -> int:
        """Return how many eigenvalues of the moving average are above ``damping``.

        For a grouped layer it is the largest number of any group. It takes O(size³) operations, or O(size) for a
        diagonal.
        """
        mean = self.mean()
        values = mean if self.diagonal else torch.linalg.eigvalsh(mean)
        return int((values > damping).sum(-1).max())

    def state(self) -> dict[str, Any]:
        """Return the moving average, the inverse and the counters as a dictionary, which `load` reads."""
        inverse = None if self.inverse is None else saved(self.inverse)
        parts = ("total", *_COUNTS)
        return {"inverse": inverse} | {part: getattr(self, part) for part in parts}

    def load(self, state: Mapping[str, Any], device: torch.device, average: bool, inverse: bool) -> None:
        """Restore the moving average, the inverse and the counters from a dictionary that `state` returned.

        Args:
            state: the dictionary.
            device: the device of the restored tensors.
            average: whether this process needs the moving average. Otherwise only its trace is stored.
            inverse: whether this process needs the inverse.
        """
        for part in _COUNTS:
            setattr(self, part, state[part])
        self.total, total = None, state["total"]
        if average and total is not None:
            self.total, self.trace = total.to(device, copy=True), None
        elif total is not None:
            self.trace = float(self.trace_of(total))
        self.inverse = restored(state["inverse"], device) if inverse and state["inverse"] else None

    def average_bytes(self) -> int:
        """Return the bytes of ``total``, whether it exists already or not."""
        return torch.Size(self.shape).numel() * self.dtype.itemsize

    def inverse_bytes(self) -> int:
        """Return an upper bound of the bytes of the inverse, whether the inverse exists already or not.

        For the method ``auto`` it is the size of a dense inverse, which it may fall back to.
        """
        if self.inverse is not None and self.how != AUTO:
            return inverse_bytes(self.inverse)
        blocks, n = torch.Size(self.blocks).numel(), self.size
        rank = max(1, n // LOW_RANK_SHARE)
        numbers = {"eigen": n * n + n + 1, "low-rank": n * rank + rank + 1}.get(self.how, n * n)
        return blocks * (n if self.diagonal else numbers) * self.dtype.itemsize
