"""The largest eigenvalues of a positive semi-definite matrix by the stabilised Nyström approximation (Tropp
et al. 2017, algorithm 3), O(n² r)."""

from __future__ import annotations

import torch
from torch import Tensor


def nystrom(matrix: Tensor, rank: int, start: Tensor | None = None) -> tuple[Tensor, Tensor]:
    """Return about the ``rank`` largest eigenvalues, descending, (…, rank), and the eigenvectors of these, (…, n,
    rank). ``start``: vectors that span about the same space; missing ones are random with a fixed seed."""
    # Scaled to a largest diagonal entry of 1: a norm squares entries, which may overflow or underflow float32.
    largest = matrix.diagonal(dim1=-2, dim2=-1).amax(-1)[..., None, None]
    scale = torch.where(largest > 0, largest, torch.ones_like(largest))
    scaled = matrix / scale
    sketch = _sketch(matrix, rank, start)
    if start is None:  # one power iteration; the basis of an earlier state needs none
        sketch = scaled @ torch.linalg.qr(sketch).Q
    sketch = torch.linalg.qr(sketch).Q
    product = scaled @ sketch
    size = torch.linalg.matrix_norm(product)[..., None, None]
    shift = torch.finfo(matrix.dtype).eps * size
    while True:
        shifted = product + shift * sketch
        core = sketch.mT @ shifted
        lower, info = torch.linalg.cholesky_ex((core + core.mT) / 2)
        if not info.any():
            break
        shift = 10 * shift + torch.finfo(matrix.dtype).tiny
    # With B = ``thin``, the matrix is about B Bᵀ − shift I: its eigenvalues are σ² − shift for B's singular values σ.
    thin = torch.linalg.solve_triangular(lower, shifted.mT, upper=False).mT
    q, r = torch.linalg.qr(thin)
    left, singular, _ = torch.linalg.svd(r)
    return (singular.square() - shift[..., 0]).clamp_min(0) * scale[..., 0], q @ left


def _sketch(matrix: Tensor, rank: int, start: Tensor | None) -> Tensor:
    kept = None if start is None else start[..., : min(rank, start.shape[-1])]
    missing = rank - (0 if kept is None else kept.shape[-1])
    # The seed is fixed, so that a resumed training run computes the same bits.
    generator = torch.Generator().manual_seed(matrix.shape[-1])
    random = torch.randn(matrix.shape[-1], missing, generator=generator, dtype=torch.float64)
    drawn = random.to(matrix).expand(*matrix.shape[:-2], -1, -1)
    return drawn if kept is None else torch.cat((kept.to(matrix), drawn), -1)
