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
    """The inverse (F + λ I)⁻¹ of a Kronecker factor F of n rows with damping λ, in some form.

    Its fields are tensors or tuples of tensors, so that it can be saved and sent. ``kind``: the name of the form.
    """

    kind: ClassVar[str]

    def apply(self, x: Tensor) -> Tensor:
        """Return (F + λ I)⁻¹ ``x``, for ``x`` of shape (…, n, columns)."""


@dataclass(frozen=True)
class Dense:
    """The inverse (F + λ I)⁻¹ as a matrix. ``matrix``: (…, n, n)."""

    matrix: Tensor
    kind: ClassVar[str] = "dense"

    def apply(self, x: Tensor) -> Tensor:
        """Return (F + λ I)⁻¹ ``x`` for ``x`` of shape (…, n, columns), by one matrix multiplication."""
        return self.matrix @ x


@dataclass(frozen=True)
class Spectral:
    """The inverse (F + λ I)⁻¹, or an approximation, by r eigenvectors of the factor F.

    ``basis``: the eigenvectors, (…, n, r). ``scales``: the eigenvalue of the inverse for each eigenvector, (…, r).
    ``rest``: the eigenvalue of the inverse for all vectors that are orthogonal to ``basis``, (…).
    """

    basis: Tensor
    scales: Tensor
    rest: Tensor
    kind: ClassVar[str] = "spectral"

    def apply(self, x: Tensor) -> Tensor:
        """Return (F + λ I)⁻¹ ``x`` for ``x`` of shape (…, n, columns), by two multiplications with the eigenvectors."""
        rest = self.rest[..., None, None]
        return x * rest + self.basis @ ((self.scales[..., None] - rest) * (self.basis.mT @ x))


@dataclass(frozen=True)
class Diagonal:
    """The inverse of the diagonal of F + λ I, for a factor F of n rows. ``scales``: the inverse's diagonal, (…, n)."""

    scales: Tensor
    kind: ClassVar[str] = "diagonal"

    def apply(self, x: Tensor) -> Tensor:
        """Return the product of the inverse and ``x``, (…, n, columns): each row of ``x`` times its entry of
        ``scales``."""
        return self.scales[..., None] * x


@dataclass(frozen=True)
class Hierarchical:
    """The inverse (F + λ I)⁻¹ with off-diagonal blocks of low rank (HODLR). ``leaves``, ``levels``: as from
    `hodlr.inverse`."""

    leaves: Tensor
    levels: tuple[Tensor, ...]
    kind: ClassVar[str] = "hierarchical"

    def apply(self, x: Tensor) -> Tensor:
        """Return (F + λ I)⁻¹ ``x`` for one matrix ``x``, (n, columns); batches of matrices are not supported."""
        return hodlr.apply(self.leaves, self.levels, x)


Make: TypeAlias = Callable[[Tensor, float, Inverse | None], Inverse]
"""A function from a factor F (…, n, n), the damping λ and the previous inverse (or None) to the inverse."""


def cholesky(factor: Tensor, damping: float, _before: Inverse | None = None) -> Dense:
    """Invert ``factor`` + λ I by Cholesky factorisation. ``factor``: (…, n, n); ``damping``: λ.

    If rounding errors make the damped factor indefinite, λ is increased tenfold or more until the factorisation
    succeeds. The previous inverse is ignored.
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
    """Invert ``factor`` + λ I by all eigenvectors. ``factor``: (…, n, n); ``damping``: λ.

    Negative eigenvalues, which are rounding errors, count as 0. It takes five times as long as Cholesky factorisation
    (measured). The previous inverse is ignored.
    """
    values, vectors = torch.linalg.eigh(factor)
    return Spectral(vectors, 1 / (values.clamp_min(0) + damping), values.new_zeros(values.shape[:-1]))


def low_rank(factor: Tensor, damping: float, before: Inverse | None = None) -> Spectral:
    """Invert ``factor`` + λ I approximately by n ÷ 8 largest eigenvalues (Nyström). ``factor``: (…, n, n); ``damping``:
    λ.

    The approximation starts with the eigenvectors of the previous inverse ``before``, if it has any. The orthogonal
    complement is divided by λ + the mean of the other eigenvalues: dividing by λ alone makes the error up to 20 times
    larger (measured).
    """
    rank = max(1, factor.shape[-1] // LOW_RANK_SHARE)
    values, basis = nystrom(factor, rank, before.basis if isinstance(before, Spectral) else None)
    return low_rank_inverse(factor, values, basis, damping)


def low_rank_inverse(factor: Tensor, values: Tensor, basis: Tensor, damping: float) -> Spectral:
    """Return an approximate inverse of ``factor`` + λ I from the largest eigenvalues.

    The orthogonal complement of ``basis`` is divided by λ + the mean of the eigenvalues that are left out.

    Args:
        factor: (…, n, n).
        values: the r largest eigenvalues, (…, r).
        basis: their eigenvectors, (…, n, r).
        damping: λ.
    """
    trace = factor.diagonal(dim1=-2, dim2=-1).sum(-1)
    discarded = (trace - values.sum(-1)).clamp_min(0) / max(1, factor.shape[-1] - values.shape[-1])
    return Spectral(basis, 1 / (values + damping), 1 / (discarded + damping))


def diagonal(factor: Tensor, damping: float, _before: Inverse | None = None) -> Diagonal:
    """Invert a diagonal factor + λ I. ``factor``: the diagonal, (…, n), negative entries count as 0; ``damping``: λ."""
    return Diagonal(1 / (factor.clamp_min(0) + damping))


def hierarchical(factor: Tensor, damping: float, _before: Inverse | None = None) -> Inverse:
    """Invert ``factor`` + λ I with off-diagonal blocks of low rank (`hodlr`). ``factor``: (n, n); ``damping``: λ.

    Batches of factors (more dimensions), and factors of at most 64 rows, are inverted by Cholesky factorisation.

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
    """Return an inverse as a dictionary, for `restored`: its tensors by field name, and its form under ``kind``."""
    return {"kind": inverse.kind} | {f.name: getattr(inverse, f.name) for f in fields(inverse)}  # type: ignore[arg-type]


def restored(state: Mapping[str, Any], device: torch.device) -> Inverse:
    """Return the inverse that `saved` turned into the dictionary ``state``, with its tensors on ``device``."""
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
