"""The memory that a step of the optimizer `KFAC` allocates temporarily.

A step has three phases, and the largest of them counts:

1. the statistics of each layer are unpacked, packed in another form, and added to the moving averages;
2. factors are inverted, one after the other;
3. the gradients of all layers become matrices, whose updates are computed and applied.

The numbers of copies are those at the peak of each phase, measured with PyTorch 2.13 on a CPU. Tests measure them
again.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass

import torch

from rematplan.optim.factor import Factor
from rematplan.optim.layer import Layer

INVERSION_COPIES: Mapping[str, float] = {
    "auto": 3,
    "cholesky": 3,
    "eigen": 4,
    "low-rank": 3,
}
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
    """How many copies of some tensors an exchange between processes allocates temporarily, at most.

    ``sums``: of the statistics of all layers. ``inverses``: of the inverses that this process uses. ``gradients``: of
    the gradients of all layers. ``others``: of the gradients of all other parameters.
    """

    sums: int = 0
    inverses: int = 0
    gradients: int = 0
    others: int = 0


def sums_bytes(layer: Layer) -> int:
    """Return the temporary bytes of computing the vector `Layer.sums` from one layer's statistics, the vector
    included."""
    dense = sum(_dense(side) for side in layer.sides)
    joined = 2 if layer.form.groups > 1 else 1  # blocks with different inputs are copied into one tensor
    return joined * dense + 2 * _vector(layer)


def step_bytes(
    layers: Mapping[str, Layer], owned: Collection[str], copies: Copies, others: int, rest: int
) -> int:
    """Return an upper bound of the bytes that one step allocates temporarily, in addition to parameters, gradients,
    statistics and the optimizer's state.

    Args:
        layers: all layers with Kronecker factors, by weight name.
        owned: the weight names of the layers of which this process inverts a factor.
        copies: what the exchange between processes allocates.
        others: temporary bytes of the step of the optimizer for the parameters without factors.
        rest: bytes of these parameters.
    """
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
