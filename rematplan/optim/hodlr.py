"""Hierarchical inverses: blocks off the diagonal as low-rank products, level by level (HODLR).

Ambikasaran and Darve (2013): A = diag(A₁, A₂) (I + W P Zᵀ), where the blocks off the diagonal are U Vᵀ and V Uᵀ,
Z = diag(U, V), W = diag(A₁⁻¹ U, A₂⁻¹ V) and P swaps the two; so A⁻¹ = (I − W (P + Zᵀ W)⁻¹ Zᵀ) diag(A₁⁻¹, A₂⁻¹). All
nodes of a level are one batch. O(n r log n) numbers and, for a vector, operations.

Factors of trained networks gain nothing by this form: see docs/second-order.md.
"""

from __future__ import annotations

import torch
from torch import Tensor

from rematplan.ir import ProblemError

LEAF = 64
"""Blocks on the diagonal have at most so many rows."""
RANK = 32
"""The rank of blocks off the diagonal."""


class NotDefinite(ProblemError):
    """The truncated form of a factor is not positive definite."""


def inverse(
    matrix: Tensor, damping: float, rank: int = RANK, leaf: int = LEAF
) -> tuple[Tensor, tuple[Tensor, ...]]:
    """The inverse of ``matrix`` + ``damping`` I, (n, n), in hierarchical form, for `apply`.

    Raises:
        NotDefinite: the form, made dense, is not positive definite, or not finite.
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
    """The hierarchical inverse times ``x``, (n, columns)."""
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
    """W and Z, (nodes, 2, half, rank), and (P + Zᵀ W)⁻¹, (nodes, 2 rank, 2 rank), of the nodes of 2 × ``half`` rows."""
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
    """Blocks ≈ U Vᵀ by a random range and one power iteration (Halko, Martinsson and Tropp 2011)."""
    generator = torch.Generator().manual_seed(rank)
    start = torch.randn(blocks.shape[-1], rank, generator=generator, dtype=torch.float64).to(blocks)
    basis = torch.linalg.qr(blocks @ (blocks.mT @ (blocks @ start))).Q
    return basis, (basis.mT @ blocks).mT
