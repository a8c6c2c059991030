"""Packed symmetric matrices: the lower triangle in block columns, each a dense rectangle.

A d × d matrix is divided into block columns of width b. Each block column is stored without the rows above its diagonal
block. Matrix products can therefore write into the packed tensor directly, and (d² + d·b) / 2 numbers are stored
instead of d². A matrix may have a border: one more row and column, for an input that is always one. The d + 1 numbers
of the border come last.
"""

from __future__ import annotations

import functools
import operator
from collections.abc import Iterator

from torch import Tensor

LEAST_WIDTH = 64
"""The smallest width of a block column. Narrower ones cost more time than they save memory."""
COLUMNS = 16
"""The number of block columns of a large matrix."""


def block_columns(d: int) -> Iterator[tuple[int, int, int]]:
    """Yield, for each block column of a packed d × d matrix: its first column, its end column (exclusive), and its
    offset in the packed tensor."""
    width, offset = max(LEAST_WIDTH, -(-d // COLUMNS)), 0
    for start in range(0, d, width):
        end = min(start + width, d)
        yield start, end, offset
        offset += (d - start) * (end - start)


def packed_size(d: int, border: bool = False) -> int:
    """Return how many numbers are stored for a packed symmetric d × d matrix. With ``border`` the matrix has
    one more row and column, of d + 1 numbers, which are stored at the end."""
    return sum((d - start) * (end - start) for start, end, _ in block_columns(d)) + border * (d + 1)


def block_column(packed: Tensor, d: int, start: int, end: int, offset: int) -> Tensor:
    """Return a block column of packed matrices (..., `packed_size`) as a view (..., d − start, end − start): the rows
    from ``start`` on.

    Args:
        packed: the packed matrices.
        d: their number of rows, without a border.
        start: the first column, as `block_columns` yields it.
        end: the end column (exclusive).
        offset: the block column's offset in the packed tensor.
    """
    rows, width = d - start, end - start
    column: Tensor = packed[..., offset : offset + rows * width].unflatten(-1, (rows, width))
    return column


def unpack(packed: Tensor, d: int, border: bool = False) -> Tensor:
    """Return packed symmetric matrices (..., `packed_size`) as dense ones (..., d + border, d + border).

    Args:
        packed: the packed matrices.
        d: their number of rows, without a border.
        border: whether they have one more row and column, which is stored at the end.
    """
    whole = d + border
    dense = packed.new_empty((*packed.shape[:-1], whole, whole))
    for start, end, offset in block_columns(d):
        column = block_column(packed, d, start, end, offset)
        dense[..., start:d, start:end] = column
        dense[..., start:end, end:d] = column[..., end - start :, :].mT
    if border:
        dense[..., d, :] = dense[..., :, d] = packed[..., -whole:]
    return dense


def diagonal_blocks(packed: Tensor, d: int, count: int) -> Tensor:
    """Return the ``count`` equal blocks on the diagonal of a packed symmetric d × d matrix, (count, d / count, d /
    count), without the dense matrix.

    Args:
        packed: the packed matrix, (`packed_size`,), without a border.
        d: its number of rows, a multiple of ``count``.
        count: the number of blocks.
    """
    size = d // count
    blocks = packed.new_empty((count, size, size))
    for start, end, offset in block_columns(d):
        column = block_column(packed, d, start, end, offset)
        for at in range(start // size, -(-end // size)):
            top, bottom = at * size, (at + 1) * size
            left, right = max(start, top), min(end, bottom)
            part = column[left - start : bottom - start, left - start : right - start]
            block, first, last = blocks[at], left - top, right - top
            block[first:, first:last] = part
            block[first:last, last:] = part[last - first :].mT
    return blocks


def packed_trace(packed: Tensor, d: int) -> Tensor:
    """Return the traces, of shape (...), of packed d × d matrices without a border (..., `packed_size`)."""
    diagonals = (
        block_column(packed, d, *at)[..., : at[1] - at[0], :].diagonal(dim1=-2, dim2=-1).sum(-1)
        for at in block_columns(d)
    )
    return functools.reduce(operator.add, diagonals)


def pack(dense: Tensor) -> Tensor:
    """Return dense symmetric matrices (..., d, d) in packed form (..., `packed_size`), without a border. Only entries
    on and below the diagonal blocks are read."""
    d = dense.shape[-1]
    packed = dense.new_empty((*dense.shape[:-2], packed_size(d)))
    for start, end, offset in block_columns(d):
        block_column(packed, d, start, end, offset).copy_(dense[..., start:, start:end])
    return packed
