"""Inverses of damped factors: (F + λ I)⁻¹ of a symmetric positive semi-definite F, in one row of a table each."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, fields
from types import MappingProxyType
from typing import Any, ClassVar, Protocol, TypeAlias

import torch
from torch import Tensor

from rematplan.optim import hodlr
from rematplan.optim.nystrom import nystrom

LOW_RANK_SHARE = 8
"""A low-rank inverse keeps one eigenvector for each that many rows."""
MORE_DAMPING = 10.0
"""The factor by which damping grows until a Cholesky factorisation succeeds."""


class Inverse(Protocol):
    """(F + λ I)⁻¹. Its fields are tensors, so that they can be saved and sent."""

    kind: ClassVar[str]

    def apply(self, x: Tensor) -> Tensor:
        """(F + λ I)⁻¹ ``x`` for ``x`` (…, n, columns)."""


@dataclass(frozen=True)
class Dense:
    """The inverse itself, (…, n, n)."""

    matrix: Tensor
    kind: ClassVar[str] = "dense"

    def apply(self, x: Tensor) -> Tensor:
        """One product."""
        return self.matrix @ x


@dataclass(frozen=True)
class Spectral:
    """Eigenvectors (…, n, r) and what the inverse multiplies each by, (…, r); the rest of the space by ``rest`` (…)."""

    basis: Tensor
    scales: Tensor
    rest: Tensor
    kind: ClassVar[str] = "spectral"

    def apply(self, x: Tensor) -> Tensor:
        """Two products with the basis."""
        rest = self.rest[..., None, None]
        return x * rest + self.basis @ ((self.scales[..., None] - rest) * (self.basis.mT @ x))


@dataclass(frozen=True)
class Diagonal:
    """The inverse of the diagonal, (…, n)."""

    scales: Tensor
    kind: ClassVar[str] = "diagonal"

    def apply(self, x: Tensor) -> Tensor:
        """A product a row."""
        return self.scales[..., None] * x


@dataclass(frozen=True)
class Hierarchical:
    """The inverse of a hierarchically off-diagonal low-rank matrix (`hodlr`): leaves, and three tensors a level."""

    leaves: Tensor
    levels: tuple[Tensor, ...]
    kind: ClassVar[str] = "hierarchical"

    def apply(self, x: Tensor) -> Tensor:
        """The products of each level."""
        return hodlr.apply(self.leaves, self.levels, x)


Make: TypeAlias = Callable[[Tensor, float, Inverse | None], Inverse]
"""The factor F (…, n, n), λ and the inverse before, if there is one → the inverse."""


def cholesky(factor: Tensor, damping: float, _before: Inverse | None = None) -> Dense:
    """By Cholesky factorisation. Where rounding makes F + λ I indefinite, λ grows tenfold until it is not."""
    mean = float(factor.diagonal(dim1=-2, dim2=-1).mean())
    least = torch.finfo(factor.dtype).eps * factor.shape[-1] * max(mean, 0.0)
    while True:
        damped = factor.clone()
        damped.diagonal(dim1=-2, dim2=-1).add_(damping)
        lower, info = torch.linalg.cholesky_ex(damped)
        if not info.any():
            return Dense(torch.cholesky_inverse(lower))
        damping = max(MORE_DAMPING * damping, least)


def eigen(factor: Tensor, damping: float, _before: Inverse | None = None) -> Spectral:
    """By all eigenvectors; five times the time of Cholesky (measured), for an inverse whose spectrum is known."""
    values, vectors = torch.linalg.eigh(factor)
    return Spectral(vectors, 1 / (values.clamp_min(0) + damping), values.new_zeros(values.shape[:-1]))


def low_rank(factor: Tensor, damping: float, before: Inverse | None = None) -> Spectral:
    """By the largest eigenvalues (Nyström), with their mean in place of the others.

    The sketch begins with the basis of the inverse before, if it has one. The rest of the space is divided by λ + the
    mean discarded eigenvalue: λ alone makes the error up to 20 times larger (measured).
    """
    rank = max(1, factor.shape[-1] // LOW_RANK_SHARE)
    values, basis = nystrom(factor, rank, before.basis if isinstance(before, Spectral) else None)
    return low_rank_inverse(factor, values, basis, damping)


def low_rank_inverse(factor: Tensor, values: Tensor, basis: Tensor, damping: float) -> Spectral:
    """The inverse by some eigenvalues (…, r) of F and their vectors (…, n, r)."""
    trace = factor.diagonal(dim1=-2, dim2=-1).sum(-1)
    discarded = (trace - values.sum(-1)).clamp_min(0) / max(1, factor.shape[-1] - values.shape[-1])
    return Spectral(basis, 1 / (values + damping), 1 / (discarded + damping))


def diagonal(factor: Tensor, damping: float, _before: Inverse | None = None) -> Diagonal:
    """By the diagonal alone: a vector (…, n) in place of the factor will do."""
    return Diagonal(1 / (factor.clamp_min(0) + damping))


def hierarchical(factor: Tensor, damping: float, _before: Inverse | None = None) -> Inverse:
    """By a hierarchical low-rank form.

    Raises:
        NotDefinite: the truncated form is not positive definite.
    """
    if factor.dim() > 2 or factor.shape[-1] <= hodlr.LEAF:
        return cholesky(factor, damping)
    return Hierarchical(*hodlr.inverse(factor, damping))


INVERSES: Mapping[str, Make] = MappingProxyType(
    {
        "cholesky": cholesky,
        "eigen": eigen,
        "low-rank": low_rank,
        "diagonal": diagonal,
        "hierarchical": hierarchical,
    }
)
"""How to invert, by name."""

_KINDS: Mapping[str, type[Any]] = {c.kind: c for c in (Dense, Spectral, Diagonal, Hierarchical)}


def saved(inverse: Inverse) -> dict[str, Any]:
    """An inverse as a dictionary of tensors and its kind."""
    return {"kind": inverse.kind} | {f.name: getattr(inverse, f.name) for f in fields(inverse)}  # type: ignore[arg-type]


def restored(state: Mapping[str, Any], device: torch.device) -> Inverse:
    """The inverse that `saved` gave, on a device."""
    parts = {
        name: tuple(t.to(device) for t in part) if isinstance(part, (tuple, list)) else part.to(device)
        for name, part in state.items()
        if name != "kind"
    }
    made: Inverse = _KINDS[state["kind"]](**parts)
    return made


def inverse_bytes(inverse: Inverse) -> int:
    """Bytes of its tensors."""
    parts = (getattr(inverse, f.name) for f in fields(inverse))  # type: ignore[arg-type]
    return sum(t.nbytes for part in parts for t in (part if isinstance(part, tuple) else (part,)))
