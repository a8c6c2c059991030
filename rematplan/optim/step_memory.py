"""The bytes that a step of `KFAC` allocates temporarily: the largest of reading statistics, inverting, and
updating.

The copies were measured at each peak with PyTorch 2.13 on a CPU; tests measure them again.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass

import torch

from rematplan.optim.factor import Factor
from rematplan.optim.layer import Layer

INVERSION_COPIES: Mapping[str, float] = {"auto": 3, "cholesky": 3, "eigen": 4, "low-rank": 3}
"""The bytes that an inversion allocates at its peak, the new inverse included, divided by those of the factor as a
dense matrix. By method."""
INVERSION_VECTORS = 16
"""Further bytes of an inversion, divided by those of a vector with one number for each row of the factor."""
MATRIX_COPIES = 6
"""The number of matrices that the computation or the application of one layer's update allocates at its peak, in the
shape of the layer's weight and bias as one matrix."""
SCALARS = 4096
"""Bytes of scalars."""


@dataclass(frozen=True)
class Copies:
    """The most copies that an exchange between processes allocates temporarily."""

    sums: int = 0
    """The bytes of the statistics of all layers."""
    inverses: int = 0
    """The bytes of the inverses that this process uses."""
    gradients: int = 0
    """The bytes of the gradients of all layers."""
    others: int = 0
    """The bytes of the gradients of all other parameters."""


def sums_bytes(layer: Layer) -> int:
    """Return the temporary bytes of computing `Layer.sums` of one layer's statistics, the vector included."""
    dense = sum(_dense(side) for side in layer.sides)
    joined = 2 if layer.form.groups > 1 else 1  # blocks with different inputs are copied into one tensor
    return joined * dense + 2 * _vector(layer)


def step_bytes(
    layers: Mapping[str, Layer], owned: Collection[str], copies: Copies, others: int, rest: int
) -> int:
    """Return an upper bound of the bytes that one step allocates temporarily. ``owned``: layers of which this process
    inverts a factor. ``others``: the temporary bytes of the other optimizer. ``rest``: the bytes of its parameters."""
    every = layers.values()
    matrices = [layer.shape.numel() * layer.a.dtype.itemsize for layer in every]
    read = max(map(sums_bytes, every), default=0) + copies.sums * sum(map(_vector, every))
    inverted = max((_inversion(side) for name in owned for side in layers[name].sides), default=0)
    inverted += copies.inverses * sum(side.inverse_bytes() for layer in every for side in layer.sides)
    moved = (2 + copies.gradients) * sum(matrices) + copies.others * rest
    moved += max(MATRIX_COPIES * max(matrices, default=0), others)
    return max(read, inverted, moved) + SCALARS


def _dense(side: Factor) -> int:
    columns = 1 if side.diagonal else side.size
    return torch.Size(side.blocks).numel() * side.size * columns * side.dtype.itemsize


def _vector(layer: Layer) -> int:
    return layer.no_sums("meta").nbytes


def _inversion(side: Factor) -> int:
    row = torch.Size(side.blocks).numel() * side.size * side.dtype.itemsize
    return int(INVERSION_COPIES.get(side.how, 0) * _dense(side)) + INVERSION_VECTORS * row
