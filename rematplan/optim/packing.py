"""Symmetric matrices without their second triangle, for state that is held and buffers that are sent.

The form is the rectangular full packed form (Gustavson et al., 2010): the triangles of the two diagonal blocks share
one rectangle, so that packing is two masks and a copy, without index tensors. For an even side n = 2k:

    rows 0..k of the rectangle (2k + 1, k): row r has the lower triangle of block (0, 0) where column < r, and the upper
    triangle of block (1, 1) where column ≥ r; rows k + 1..2k: block (1, 0).
"""

from __future__ import annotations

import torch
from torch import Tensor


def packed_size(side: int) -> int:
    """Elements of a packed symmetric matrix of ``side`` rows; an odd side counts as the next even one."""
    even = side + side % 2
    return even * (even + 1) // 2


def pack(matrix: Tensor) -> Tensor:
    """The packed form of symmetric matrices.

    Args:
        matrix: (…, n, n), symmetric; only the lower triangle is read.

    Returns:
        (…, `packed_size` (n)), in the same type.
    """
    if matrix.shape[-1] % 2:
        matrix = torch.nn.functional.pad(matrix, (0, 1, 0, 1))
    half = matrix.shape[-1] // 2
    out = matrix.new_zeros(*matrix.shape[:-2], 2 * half + 1, half)
    out[..., 1 : half + 1, :] = matrix[..., :half, :half].tril()
    out[..., :half, :] += matrix[..., half:, half:].mT.triu()
    out[..., half + 1 :, :] = matrix[..., half:, :half]
    return out.flatten(-2)


def unpack(packed: Tensor, side: int) -> Tensor:
    """The symmetric matrices (…, ``side``, ``side``) of a packed form (…, `packed_size` (side))."""
    half = (side + 1) // 2
    rectangle = packed.unflatten(-1, (2 * half + 1, half))
    matrix = packed.new_empty(*packed.shape[:-1], 2 * half, 2 * half)
    lower = rectangle[..., 1 : half + 1, :].tril()
    upper = rectangle[..., :half, :].triu()
    matrix[..., :half, :half] = lower + lower.tril(-1).mT
    matrix[..., half:, half:] = upper.mT + upper.triu(1)
    matrix[..., half:, :half] = rectangle[..., half + 1 :, :]
    matrix[..., :half, half:] = rectangle[..., half + 1 :, :].mT
    return matrix[..., :side, :side]


def packed_trace(packed: Tensor, side: int) -> Tensor:
    """The traces (…) of packed symmetric matrices."""
    half = (side + 1) // 2
    rectangle = packed.unflatten(-1, (2 * half + 1, half))
    first: Tensor = rectangle[..., 1 : half + 1, :].diagonal(dim1=-2, dim2=-1).sum(-1)
    second: Tensor = rectangle[..., :half, :].diagonal(dim1=-2, dim2=-1).sum(-1)
    return first + second
