"""Inverses of damped factors, (F + λ I)⁻¹ with F symmetric and positive semi-definite: a table of methods."""

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
"""A low-rank inverse of n rows has n ÷ 8 eigenvectors."""
MORE_DAMPING = 10.0
"""The damping grows by this factor until the Cholesky factorisation succeeds."""


class Inverse(Protocol):
    """The inverse (F + λ I)⁻¹ of a factor F with damping λ, in some form.

    Its fields are tensors or tuples of tensors, so that it can be saved and sent.
    """

    kind: ClassVar[str]

    def apply(self, x: Tensor) -> Tensor:
        """Return (F + λ I)⁻¹ ``x``, for ``x`` of shape (…, n, columns)."""


@dataclass(frozen=True)
class Dense:
    """The inverse as a matrix, (…, n, n)."""

    matrix: Tensor
    kind: ClassVar[str] = "dense"

    def apply(self, x: Tensor) -> Tensor:
        """Return the product of the inverse and ``x``, by one matrix multiplication."""
        return self.matrix @ x


@dataclass(frozen=True)
class Spectral:
    """The inverse by eigenvectors.

    ``basis``: r eigenvectors of F, (…, n, r). ``scales``: the eigenvalue of the inverse for each of them, (…, r).
    ``rest``: the eigenvalue of the inverse for all vectors orthogonal to them, (…).
    """

    basis: Tensor
    scales: Tensor
    rest: Tensor
    kind: ClassVar[str] = "spectral"

    def apply(self, x: Tensor) -> Tensor:
        """Return the product of the inverse and ``x``, by two multiplications with the basis."""
        rest = self.rest[..., None, None]
        return x * rest + self.basis @ ((self.scales[..., None] - rest) * (self.basis.mT @ x))


@dataclass(frozen=True)
class Diagonal:
    """The inverse of the diagonal of F + λ I. ``scales``: its entries, (…, n)."""

    scales: Tensor
    kind: ClassVar[str] = "diagonal"

    def apply(self, x: Tensor) -> Tensor:
        """Return the product of the inverse and ``x``, by scaling each row."""
        return self.scales[..., None] * x


@dataclass(frozen=True)
class Hierarchical:
    """The inverse of a matrix whose off-diagonal blocks are of low rank; the tensors of `hodlr.inverse`."""

    leaves: Tensor
    levels: tuple[Tensor, ...]
    kind: ClassVar[str] = "hierarchical"

    def apply(self, x: Tensor) -> Tensor:
        """Return the product of the inverse and ``x``, which must be one matrix (n, columns)."""
        return hodlr.apply(self.leaves, self.levels, x)


Make: TypeAlias = Callable[[Tensor, float, Inverse | None], Inverse]
"""A function from a factor F (…, n, n), the damping λ and the previous inverse (or None) to the inverse."""


def cholesky(factor: Tensor, damping: float, _before: Inverse | None = None) -> Dense:
    """Invert F + λ I by Cholesky factorisation; λ is ``damping``.

    If rounding errors make F + λ I indefinite, λ is increased tenfold or more until the factorisation succeeds.
    """
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
    """Invert by all eigenvectors. Negative eigenvalues, which are rounding errors, count as 0.

    It takes five times as long as Cholesky factorisation (measured).
    """
    values, vectors = torch.linalg.eigh(factor)
    return Spectral(vectors, 1 / (values.clamp_min(0) + damping), values.new_zeros(values.shape[:-1]))


def low_rank(factor: Tensor, damping: float, before: Inverse | None = None) -> Spectral:
    """Invert by the largest eigenvalues (Nyström approximation), one for 8 rows.

    The sketch starts with the eigenvectors of the previous inverse, if it has any. The orthogonal complement is
    divided by λ + the mean of the other eigenvalues: dividing by λ alone makes the error up to 20 times larger
    (measured).
    """
    rank = max(1, factor.shape[-1] // LOW_RANK_SHARE)
    values, basis = nystrom(factor, rank, before.basis if isinstance(before, Spectral) else None)
    return low_rank_inverse(factor, values, basis, damping)


def low_rank_inverse(factor: Tensor, values: Tensor, basis: Tensor, damping: float) -> Spectral:
    """Return the inverse by given eigenvalues ``values`` (…, r) of ``factor`` and eigenvectors ``basis`` (…, n,
    r).
    """
    trace = factor.diagonal(dim1=-2, dim2=-1).sum(-1)
    discarded = (trace - values.sum(-1)).clamp_min(0) / max(1, factor.shape[-1] - values.shape[-1])
    return Spectral(basis, 1 / (values + damping), 1 / (discarded + damping))


def diagonal(factor: Tensor, damping: float, _before: Inverse | None = None) -> Diagonal:
    """Invert a diagonal factor. ``factor``: its diagonal entries, (…, n); negative ones count as 0."""
    return Diagonal(1 / (factor.clamp_min(0) + damping))


def hierarchical(factor: Tensor, damping: float, _before: Inverse | None = None) -> Inverse:
    """Invert by a hierarchical low-rank form. Batches of factors, and factors of at most 64 rows, are inverted by
    Cholesky.

    Raises:
        NotDefinite: the low-rank approximation is not positive definite.
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
"""The methods of inversion, by the name that the option ``inverse`` takes."""

_KINDS: Mapping[str, type[Any]] = {c.kind: c for c in (Dense, Spectral, Diagonal, Hierarchical)}


def saved(inverse: Inverse) -> dict[str, Any]:
    """Return an inverse as a dictionary: its tensors by field name, and its kind."""
    return {"kind": inverse.kind} | {f.name: getattr(inverse, f.name) for f in fields(inverse)}  # type: ignore[arg-type]


def restored(state: Mapping[str, Any], device: torch.device) -> Inverse:
    """Return the inverse that `saved` made a dictionary of, with its tensors on ``device``."""
    parts = {
        name: tuple(t.to(device) for t in part) if isinstance(part, (tuple, list)) else part.to(device)
        for name, part in state.items()
        if name != "kind"
    }
    made: Inverse = _KINDS[state["kind"]](**parts)
    return made


def inverse_bytes(inverse: Inverse) -> int:
    """Return the bytes of an inverse's tensors."""
    parts = (getattr(inverse, f.name) for f in fields(inverse))  # type: ignore[arg-type]
    return sum(t.nbytes for part in parts for t in (part if isinstance(part, tuple) else (part,)))
