"""Hierarchical inverses (HODLR): off-diagonal blocks as low-rank products, level by level.

Ambikasaran and Darve (2013): A = diag(A₁, A₂) (I + W P Zᵀ). The off-diagonal blocks are U Vᵀ and V Uᵀ, Z = diag(U,
V), W = diag(A₁⁻¹ U, A₂⁻¹ V), and P swaps the two halves. So A⁻¹ = (I − W (P + Zᵀ W)⁻¹ Zᵀ) diag(A₁⁻¹, A₂⁻¹). All nodes
of a level are computed as one batch. The inverse has O(n r log n) numbers, and its product with a vector takes as
many operations.

Factors of trained networks do not gain from this form: see docs/second-order.md.
"""

from __future__ import annotations

import torch
from torch import Tensor

from rematplan.ir import ProblemError

LEAF = 64
"""The largest number of rows of a block on the diagonal."""
RANK = 32
"""The rank of an off-diagonal block."""


class NotDefinite(ProblemError):
    """The low-rank approximation of a factor is not positive definite."""


def inverse(
    matrix: Tensor, damping: float, rank: int = RANK, leaf: int = LEAF
) -> tuple[Tensor, tuple[Tensor, ...]]:
    """Return the inverse of ``matrix`` + ``damping`` I in hierarchical form, as the arguments ``leaves, levels`` of
    `apply`.

    Args:
        matrix: (n, n), symmetric and positive semi-definite.
        damping: λ, added to the diagonal.
        rank: the rank of the off-diagonal blocks.
        leaf: the largest number of rows of a diagonal block.

    Raises:
        NotDefinite: the inverse is not positive definite or not finite.
    """
    side = matrix.shape[-1]
    depth = max(0, (-(-side // leaf) - 1).bit_length())
    block = -(-side >> depth)
    padded = torch.eye(block << depth, dtype=matrix.dtype, device=matrix.device)
    padded[:side, :side] = matrix
    padded.diagonal()[:side] += damping
    nodes = padded.view(1 << depth, block, 1 << depth, block)
    leaves = torch.linalg.inv(nodes.diagonal(dim1=0, dim2=2).movedim(-1, 0))
    levels: tuple[Tensor, ...] = ()
    for height in range(depth):
        levels += _level(padded, leaves, levels, block << height, rank)
    dense = apply(leaves, levels, torch.eye(side, dtype=matrix.dtype, device=matrix.device))
    if torch.linalg.cholesky_ex((dense + dense.mT) / 2).info.item() or not dense.isfinite().all():
        raise NotDefinite(
            f"the hierarchical form of a factor of {side} rows at rank {rank} is not positive definite"
        )
    return leaves, levels


def apply(leaves: Tensor, levels: tuple[Tensor, ...], x: Tensor) -> Tensor:
    """Return the product of a hierarchical inverse of n rows and ``x``, (n, columns).

    ``leaves``, ``levels``: the two results of `inverse`.
    """
    side, columns = x.shape
    count, block, _ = leaves.shape
    y = torch.nn.functional.pad(x, (0, 0, 0, count * block - side)).view(count, block, columns)
    y = (leaves @ y).view(-1, columns)
    for at in range(0, len(levels), 3):
        w, z, core = levels[at : at + 3]
        halves = y.view(*z.shape[:3], columns)
        inner = core @ (z.mT @ halves).flatten(1, 2)
        y = (halves - w @ inner.unflatten(1, (2, -1))).view(-1, columns)
    return y[:side]


def _level(
    padded: Tensor, leaves: Tensor, below: tuple[Tensor, ...], half: int, rank: int
) -> tuple[Tensor, Tensor, Tensor]:
    """Return the tensors of one level: W and Z, (nodes, 2, half, rank), and (P + Zᵀ W)⁻¹, (nodes, 2 rank, 2 rank).

    The nodes of the level have 2 × ``half`` rows. ``below``: the tensors of the lower levels.
    """
    count = padded.shape[0] // (2 * half)
    off = padded.view(count, 2, half, count, 2, half)[:, 0, :, :, 1].diagonal(dim1=0, dim2=2).movedim(-1, 0)
    left, right = _low_rank(off, min(rank, half))
    z = torch.stack((left, right), 1)
    w = apply(leaves, below, z.reshape(-1, z.shape[-1])).view(z.shape)
    product = z.mT @ w
    swap = torch.eye(z.shape[-1], dtype=z.dtype, device=z.device).expand_as(product[:, 0])
    core = torch.cat((torch.cat((product[:, 0], swap), -1), torch.cat((swap, product[:, 1]), -1)), -2)
    return w, z, torch.linalg.inv(core)


def _low_rank(blocks: Tensor, rank: int) -> tuple[Tensor, Tensor]:
    """Approximate blocks by U Vᵀ: a random range finder with one power iteration (Halko, Martinsson and Tropp
    2011).
    """
    generator = torch.Generator().manual_seed(rank)
    start = torch.randn(blocks.shape[-1], rank, generator=generator, dtype=torch.float64).to(blocks)
    basis = torch.linalg.qr(blocks @ (blocks.mT @ (blocks @ start))).Q
    return basis, (basis.mT @ blocks).mT
