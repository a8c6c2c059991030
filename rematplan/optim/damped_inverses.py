"""Invert damped Kronecker factors, (F + λ I)⁻¹ with F positive semi-definite, by the methods in `INVERSES`.

`Layer.dampings` divides the damping between the two factors.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, fields
from types import MappingProxyType
from typing import Any, ClassVar, TypeAlias

import torch
from torch import Tensor

from rematplan.optim.nystrom import nystrom

LOW_RANK_SHARE = 8
"""A low-rank inverse of n rows has n ÷ 8 eigenvectors."""
MORE_DAMPING = 10.0
"""The damping grows by this factor until the Cholesky factorisation succeeds."""


@dataclass(frozen=True)
class Dense:
    """The inverse (F + λ I)⁻¹ of a Kronecker factor F with damping λ, as a dense matrix. ``matrix``: (…, n, n)."""

    matrix: Tensor
    kind: ClassVar[str] = "dense"

    def apply(self, x: Tensor) -> Tensor:
        """Return (F + λ I)⁻¹ ``x`` for a Kronecker factor F and damping λ, as a product. ``x``: (…, n, columns)."""
        return self.matrix @ x


@dataclass(frozen=True)
class Spectral:
    """The damped inverse (F + λ I)⁻¹ of a Kronecker factor F of n rows, from r of its eigenvectors. It is exact if r =
    n; otherwise all other directions share the eigenvalue ``rest``."""

    basis: Tensor
    """The eigenvectors, (…, n, r)."""
    scales: Tensor
    """The inverse's eigenvalue for each, (…, r)."""
    rest: Tensor
    """The inverse's eigenvalue for all orthogonal vectors, (…)."""
    kind: ClassVar[str] = "spectral"

    def apply(self, x: Tensor) -> Tensor:
        """Return (F + λ I)⁻¹ ``x`` for a Kronecker factor F and damping λ, by two products with eigenvectors of F.

        ``x``: (…, n, columns).
        """
        rest = self.rest[..., None, None]
        return x * rest + self.basis @ ((self.scales[..., None] - rest) * (self.basis.mT @ x))


@dataclass(frozen=True)
class Diagonal:
    """The inverse of the diagonal of F + λ I: ``scales``, (…, n)."""

    scales: Tensor
    kind: ClassVar[str] = "diagonal"

    def apply(self, x: Tensor) -> Tensor:
        """Return the product of a diagonal inverse and ``x``, (…, n, columns): row i of ``x`` is multiplied by
        ``scales``[…, i]."""
        return self.scales[..., None] * x


Inverse: TypeAlias = Dense | Spectral | Diagonal
"""The inverse (F + λ I)⁻¹, or an approximation. Its fields are tensors or tuples of them, so it can be sent."""
Make: TypeAlias = Callable[[Tensor, float, Inverse | None], Inverse]
"""A function from a factor F (…, n, n), the damping λ and the previous inverse (or None) to the inverse."""


def cholesky(factor: Tensor, damping: float, _before: Inverse | None = None) -> Dense:
    """Return (``factor`` + λ I)⁻¹ as a dense matrix, with a larger λ if rounding makes the sum indefinite.
    ``factor``: (…, n, n), symmetric; ``damping``: λ."""
    mean = float(factor.diagonal(dim1=-2, dim2=-1).mean())
    least = torch.finfo(factor.dtype).eps * factor.shape[-1] * max(mean, 0.0)
    while True:
        damped = factor.clone()
        damped.diagonal(dim1=-2, dim2=-1).add_(damping)
        lower, info = torch.linalg.cholesky_ex(damped)
        del damped  # before the inverse, which needs as much memory, is allocated
        if not info.any():
            return Dense(torch.cholesky_inverse(lower))
        # Rounding errors made the damped factor indefinite.
        damping = max(MORE_DAMPING * damping, least)


def eigen(factor: Tensor, damping: float, _before: Inverse | None = None) -> Spectral:
    """Return (``factor`` + λ I)⁻¹ by all eigenvectors; five times as long as Cholesky (measured). ``factor``:
    (…, n, n), symmetric."""
    values, vectors = torch.linalg.eigh(factor)
    # Negative eigenvalues are rounding errors.
    return Spectral(vectors, 1 / (values.clamp_min(0) + damping), values.new_zeros(values.shape[:-1]))


def low_rank(factor: Tensor, damping: float, before: Inverse | None = None) -> Spectral:
    """Return about (``factor`` + λ I)⁻¹ by the n ÷ 8 largest eigenvalues, by Nyström's method, which starts with the
    eigenvectors of ``before`` if that is `Spectral`. ``factor``: (…, n, n), symmetric."""
    rank = max(1, factor.shape[-1] // LOW_RANK_SHARE)
    values, basis = nystrom(factor, rank, before.basis if isinstance(before, Spectral) else None)
    return low_rank_inverse(factor, values, basis, damping)


def low_rank_inverse(factor: Tensor, values: Tensor, basis: Tensor, damping: float) -> Spectral:
    """Return about (``factor`` + λ I)⁻¹ from the r largest eigenvalues (…, r) and their eigenvectors (…, n, r)."""
    # The mean of the other eigenvalues; 0 in its place makes the error up to 20 times larger (measured).
    trace = factor.diagonal(dim1=-2, dim2=-1).sum(-1)
    discarded = (trace - values.sum(-1)).clamp_min(0) / max(1, factor.shape[-1] - values.shape[-1])
    return Spectral(basis, 1 / (values + damping), 1 / (discarded + damping))


def diagonal(factor: Tensor, damping: float, _before: Inverse | None = None) -> Diagonal:
    """Return the inverse of a diagonal factor (…, n) + λ I. Negative entries count as 0."""
    return Diagonal(1 / (factor.clamp_min(0) + damping))


INVERSES: Mapping[str, Make] = MappingProxyType(
    {"cholesky": cholesky, "eigen": eigen, "low-rank": low_rank, "diagonal": diagonal}
)
"""The methods of inversion, by the name that the option ``inverse`` takes."""

_KINDS: Mapping[str, type[Any]] = {c.kind: c for c in (Dense, Spectral, Diagonal)}


def saved(inverse: Inverse) -> dict[str, Any]:
    """Return an inverse as a dictionary of its fields and ``kind``, which `restored` reads."""
    return {"kind": inverse.kind} | {f.name: getattr(inverse, f.name) for f in fields(inverse)}


def restored(state: Mapping[str, Any], device: torch.device) -> Inverse:
    """Return the inverse that ``state``, from `saved`, describes, with its tensors on ``device``."""
    parts = {
        name: tuple(t.to(device) for t in part) if isinstance(part, (tuple, list)) else part.to(device)
        for name, part in state.items()
        if name != "kind"
    }
    made: Inverse = _KINDS[state["kind"]](**parts)
    return made


def inverse_bytes(inverse: Inverse) -> int:
    """Return the number of bytes of an inverse's tensors."""
    parts = (getattr(inverse, f.name) for f in fields(inverse))
    return sum(t.nbytes for part in parts for t in (part if isinstance(part, tuple) else (part,)))
