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
"""With ``auto``, only the diagonal of a factor with more rows is stored: with its inverse it would take 1.5 GiB."""
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
    """One of the two Kronecker factors of a layer: its moving average and its inverse."""

    size: int
    """The number of rows."""
    blocks: tuple[int, ...]
    """() for one matrix; (groups,) for one matrix per group."""
    how: str
    """The method of inversion: a name of `INVERSES` or ``auto``."""
    dtype: torch.dtype
    """The type of the average and the inverse."""
    vector: bool = False
    """Whether the statistics contain only the diagonal."""
    total: Tensor | None = None
    """The decayed sum of outer products, as a packed triangle or diagonal; None before statistics, or if
    another process stores it."""
    count: float = 0.0
    """The decayed number of rows. ``total`` ÷ ``count`` is the average, which needs no correction at the start."""
    inverse: Inverse | None = None
    """The latest inverse; None before the first inversion, or if this process does not need it."""
    made: int = 0
    """How often it has been inverted."""
    changed: bool = False
    """Whether ``total`` has changed since."""
    rank: int | None = None
    """Eigenvalues above the damping as last counted by ``auto``; None if never."""
    trace: float | None = None
    """The trace of ``total``, averaged over groups, if another process stores ``total``; else None."""

    @property
    def diagonal(self) -> bool:
        """Whether only the diagonal of the factor is stored and inverted."""
        large = self.how == AUTO and self.size > DIAGONAL_ABOVE
        return self.vector or large or self.how == "diagonal"

    @property
    def shape(self) -> tuple[int, ...]:
        """The shape of ``total``: (…, size) for a diagonal, else (…, size (size + 1) ÷ 2), with the groups first."""
        return (*self.blocks, self.size if self.diagonal else packed_size(self.size))

    @property
    def cost(self) -> float:
        """The operations of an inversion, up to a factor: size³ for each matrix, or size for a diagonal."""
        return float(torch.Size(self.blocks).numel() * self.size ** (1 if self.diagonal else 3))

    def kept(self, factor: Tensor) -> Tensor:
        """Return what is added to ``total`` of new statistics (…, size, size): the packed triangle, or the diagonal."""
        if not self.diagonal:
            return pack(factor.to(self.dtype))
        return (factor if self.vector else factor.diagonal(dim1=-2, dim2=-1)).to(self.dtype)

    def fold(self, kept: Tensor, count: float, decay: float) -> None:
        """Add statistics over ``count`` rows, in the form of `kept`, to the average, first multiplied by ``decay``."""
        if self.total is None:
            self.total = torch.zeros_like(kept)
        self.total.mul_(decay).add_(kept)
        self.count = decay * self.count + count
        self.changed = True

    def fold_trace(self, trace: float, count: float, decay: float) -> None:
        """Add the trace of statistics over ``count`` rows to `trace`, first multiplied by ``decay``, in a process that
        does not store the average."""
        self.trace = decay * (self.trace or 0.0) + trace
        self.count = decay * self.count + count

    def mean(self) -> Tensor:
        """Return the moving average: (…, size, size), or its diagonal (…, size). This process must have statistics."""
        assert self.total is not None
        mean = self.total / self.count
        return mean if self.diagonal else unpack(mean, self.size)

    def trace_of(self, kept: Tensor) -> Tensor:
        """Return the trace of a sum in the form of `kept`, averaged over groups."""
        return (kept.sum(-1) if self.diagonal else packed_trace(kept, self.size)).mean()

    def mean_eigenvalue(self) -> Tensor | float:
        """Return the trace of the moving average ÷ ``size``, averaged over the groups of a grouped layer."""
        trace = self.trace if self.total is None else self.trace_of(self.total)
        assert trace is not None
        return trace / (self.count * self.size)

    def invert(self, damping: float) -> None:
        """Invert the average + ``damping`` I into ``inverse``, exactly or approximately, by the method ``how``."""
        self.inverse = self._inverse(self.mean(), damping)
        self.made, self.changed = self.made + 1, False

    def _inverse(self, mean: Tensor, damping: float) -> Inverse:
        if self.diagonal:
            return INVERSES["diagonal"](mean, damping, None)
        if self.how == AUTO:
            return self._measured(mean, damping) or cholesky(mean, damping)
        return INVERSES[self.how](mean, damping, self.inverse)

    def _measured(self, mean: Tensor, damping: float) -> Inverse | None:
        """Return a low-rank inverse of ``mean`` + ``damping`` I. None if a dense one is better (`LOW_RANK_FROM`,
        `LOW_RANK_BELOW`), by a count of now or of less than `MEASURE_EVERY` inversions ago."""
        few = self.size // LOW_RANK_BELOW
        lately = self.rank is not None and self.rank > few and self.made % MEASURE_EVERY
        if self.size < LOW_RANK_FROM or lately:
            return None
        before = getattr(self.inverse, "basis", None)
        values, basis = nystrom(mean, self.size // LOW_RANK_SHARE, before)
        self.rank = int((values > damping).sum(-1).max())
        return low_rank_inverse(mean, values, basis, damping) if self.rank <= few else None

    def effective_rank(self, damping: float) -> int:
        """Return how many eigenvalues of the average are above ``damping``; the largest such number of all groups.
        O(size³), or O(size) for a diagonal."""
        mean = self.mean()
        values = mean if self.diagonal else torch.linalg.eigvalsh(mean)
        return int((values > damping).sum(-1).max())

    def state(self) -> dict[str, Any]:
        """Return the moving average, the inverse and the counters as a dictionary, which `load` reads."""
        inverse = None if self.inverse is None else saved(self.inverse)
        parts = ("total", *_COUNTS)
        return {"inverse": inverse} | {part: getattr(self, part) for part in parts}

    def load(self, state: Mapping[str, Any], device: torch.device, average: bool, inverse: bool) -> None:
        """Restore what `state` returned. ``average``, ``inverse``: whether this process needs them; without
        the average it keeps the trace."""
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
        """Return an upper bound of the inverse's bytes, whether it exists or not; for ``auto`` those of a dense one."""
        if self.inverse is not None and self.how != AUTO:
            return inverse_bytes(self.inverse)
        blocks, n = torch.Size(self.blocks).numel(), self.size
        rank = max(1, n // LOW_RANK_SHARE)
        numbers = {"eigen": n * n + n + 1, "low-rank": n * rank + rank + 1}.get(self.how, n * n)
        return blocks * (n if self.diagonal else numbers) * self.dtype.itemsize
