"""Hierarchical inverses (HODLR): off-diagonal blocks as low-rank products, level by level.

The method is that of Ambikasaran and Darve (2013). A symmetric matrix A has two diagonal blocks A₁ and A₂. Its
off-diagonal blocks are approximated by U Vᵀ and V Uᵀ. With Z = diag(U, V), W = diag(A₁⁻¹ U, A₂⁻¹ V), and P, which swaps
the two halves of a vector, A = diag(A₁, A₂) (I + W P Zᵀ). So A⁻¹ = (I − W (P + Zᵀ W)⁻¹ Zᵀ) diag(A₁⁻¹, A₂⁻¹). A₁ and A₂
are inverted in the same way. All blocks of a level are computed as one batch. With rank r and n rows, the inverse has
O(n r log n) numbers, and its product with a vector takes as many operations.

Factors of trained networks do not gain from this form: see docs/second-order.md.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from rematplan.ir import ProblemError

LEAF = 64
"""The largest number of rows of a diagonal block that is inverted as a dense matrix."""
RANK = 32
"""The rank of an off-diagonal block."""


class NotDefinite(ProblemError):
    """The inverse of a Kronecker factor in hierarchical low-rank form is not positive definite."""


def inverse(
    matrix: Tensor, damping: float, rank: int = RANK, leaf: int = LEAF
) -> tuple[Tensor, tuple[Tensor, ...]]:
    """Return the inverse of ``matrix`` + ``damping`` I in hierarchical form (HODLR): a pair ``leaves, levels`` for
    `apply`.

    ``leaves``: the inverses of the diagonal blocks, one batch. ``levels``: for each level, from the smallest blocks up,
    the tensors W, Z and (P + Zᵀ W)⁻¹ of the module's description.

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


@dataclass(frozen=True)
class Hierarchical:
    """The damped inverse of a factor in this form. ``leaves``, ``levels``: the two results of `inverse`."""

    leaves: Tensor
    levels: tuple[Tensor, ...]
    kind: ClassVar[str] = "hierarchical"

    def apply(self, x: Tensor) -> Tensor:
        """Return the product of the inverse and ``x``, (n, columns)."""
        return apply(self.leaves, self.levels, x)


def apply(leaves: Tensor, levels: tuple[Tensor, ...], x: Tensor) -> Tensor:
    """Return the product of a hierarchical inverse (HODLR) of n rows and ``x``, (n, columns).

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
    """Return the tensors W, Z and (P + Zᵀ W)⁻¹ of one level of a hierarchical inverse.

    A level consists of several diagonal blocks (nodes) of two halves each. Z contains the factors U and V of a node's
    off-diagonal blocks U Vᵀ and V Uᵀ. W is Z multiplied by the inverses of the two halves. P swaps the halves. W and Z
    have the shape (nodes, 2, half, rank), the third result (nodes, 2 rank, 2 rank).

    Args:
        padded: the damped matrix, with n rows, a multiple of 2 × ``half``.
        leaves: the inverses of the smallest diagonal blocks.
        below: the results of all levels with smaller diagonal blocks, one after another, smallest blocks first.
        half: the number of rows of half a node.
        rank: the rank of the off-diagonal blocks; if it is above ``half``, it is reduced to ``half``.
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
    """Approximate each matrix of a batch by U Vᵀ with orthonormal U, and return U and V.

    The method is a random range finder with one power iteration (Halko, Martinsson and Tropp 2011).

    ``blocks``: (…, rows, columns). U: (…, rows, rank). V: (…, columns, rank).
    """
    generator = torch.Generator().manual_seed(rank)
    start = torch.randn(blocks.shape[-1], rank, generator=generator, dtype=torch.float64).to(blocks)
    basis = torch.linalg.qr(blocks @ (blocks.mT @ (blocks @ start))).Q
    return basis, (basis.mT @ blocks).mT
