"""Packed symmetric matrices: the lower triangle in block columns, each a dense rectangle into which matrix
products write directly.

A d × d matrix in columns of width b stores (d² + d·b) / 2 numbers if b divides d. A border, one more row and
column of d + 1 numbers, comes last.
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
    """Yield each block column of a packed d × d matrix: its first column, end column (exclusive) and offset
    in the packed tensor."""
    width, offset = max(LEAST_WIDTH, -(-d // COLUMNS)), 0
    for start in range(0, d, width):
        end = min(start + width, d)
        yield start, end, offset
        offset += (d - start) * (end - start)


def packed_size(d: int, border: bool = False) -> int:
    """Return how many numbers a packed d × d matrix stores. With ``border`` it has one more row and column of
    d + 1 numbers."""
    return sum((d - start) * (end - start) for start, end, _ in block_columns(d)) + border * (d + 1)


def block_column(packed: Tensor, d: int, start: int, end: int, offset: int) -> Tensor:
    """Return a block column of packed matrices (..., `packed_size`) as a view (..., d − start, end − start):
    the rows from ``start`` on."""
    rows, width = d - start, end - start
    column: Tensor = packed[..., offset : offset + rows * width].unflatten(-1, (rows, width))
    return column


def unpack(packed: Tensor, d: int, border: bool = False) -> Tensor:
    """Return packed symmetric matrices (..., `packed_size`) as dense ones (..., d + border, d + border). ``border``:
    whether they have one more row and column."""
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
    """Return the ``count`` equal diagonal blocks of a packed d × d matrix without border, (count, d / count,
    d / count). The dense matrix is not made."""
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
    """Return symmetric matrices (..., d, d) packed, without border. Entries above the diagonal blocks are not read."""
    d = dense.shape[-1]
    packed = dense.new_empty((*dense.shape[:-2], packed_size(d)))
    for start, end, offset in block_columns(d):
        block_column(packed, d, start, end, offset).copy_(dense[..., start:, start:end])
    return packed
