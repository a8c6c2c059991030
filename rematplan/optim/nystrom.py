"""The largest eigenvalues of a positive semi-definite matrix from one product with a thin matrix.

The stabilised Nyström approximation of Tropp, Yurtsever, Udell and Cevher (2017), algorithm 3. O(n² r) for rank r.
"""

from __future__ import annotations

import torch
from torch import Tensor


def nystrom(matrix: Tensor, rank: int, start: Tensor | None = None) -> tuple[Tensor, Tensor]:
    """Approximations of the ``rank`` largest eigenvalues (…, rank), falling, and their vectors (…, n, rank).

    Args:
        matrix: (…, n, n), symmetric and positive semi-definite within rounding.
        rank: from 1 to n.
        start: a basis to sketch with, (…, n, any), such as that of an earlier state of the matrix; random columns of a
            fixed seed complete it, or replace it where there is none.
    """
    # Norms are squares: those of huge or tiny entries would leave the range of float32.
    largest = matrix.diagonal(dim1=-2, dim2=-1).amax(-1)[..., None, None]
    scale = torch.where(largest > 0, largest, torch.ones_like(largest))
    scaled = matrix / scale
    sketch = _sketch(matrix, rank, start)
    if start is None:  # one power iteration; a basis of an earlier state is one already
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
    thin = torch.linalg.solve_triangular(lower, shifted.mT, upper=False).mT
    q, r = torch.linalg.qr(thin)
    left, singular, _ = torch.linalg.svd(r)
    return (singular.square() - shift[..., 0]).clamp_min(0) * scale[..., 0], q @ left


def _sketch(matrix: Tensor, rank: int, start: Tensor | None) -> Tensor:
    kept = None if start is None else start[..., : min(rank, start.shape[-1])]
    missing = rank - (0 if kept is None else kept.shape[-1])
    # The seed is fixed, so that a resumed run continues with the same bits.
    generator = torch.Generator().manual_seed(matrix.shape[-1])
    random = torch.randn(matrix.shape[-1], missing, generator=generator, dtype=torch.float64)
    drawn = random.to(matrix).expand(*matrix.shape[:-2], -1, -1)
    return drawn if kept is None else torch.cat((kept.to(matrix), drawn), -1)
