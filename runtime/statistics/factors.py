"""The statistics of a step: the Kronecker factors of its weights, by parameter name.

A layer is s = W a, where a ends with a one if the layer has a bias. The gradient of its weight is a sum over
rows r (samples, positions of a convolution's output, tokens, and every use of a shared weight): ∂loss/∂W = Σ
g_r a_rᵀ. The factors are a = Σ a_r a_rᵀ and g = Σ g_r g_rᵀ, and

    F ≈ (g / samples) ⊗ (a / rows)

approximates the Fisher matrix of the mean loss (Martens and Grosse 2015; shared weights: Eschenhagen et al.
2023).

Scale. A loss is the mean or the sum of ``samples`` terms, one for each sample (or token, or pixel: whatever
cross entropy averages over). The rows g_r are gradients of the *sum* of the terms, whatever the reduction of
the user's loss, so that ``g``, ``a``, ``rows`` and ``samples`` of micro-batches, of steps and of ranks can be
added. For the Fisher kinds ``mc`` and ``type-2`` this is so by construction. For ``empirical`` the rows come
from the backward of the user's loss, and are multiplied by ``samples`` if that loss is a mean
(``loss_reduction="mean"``). Any other factor of the loss (the scale of a GradScaler, 1/k for k micro-batches)
appears squared in ``g``; the user divides ``g`` by its square.

With ``approx="expand"`` a row is one row of the layer's matrix product. With ``reduce`` a row is one sample
of the batch: a_r is the mean of its inputs over places or tokens, g_r the sum of its gradients. With a
``share`` below one, ``a`` and ``rows`` count only the selected rows, and ``g`` is multiplied by all rows ÷
selected rows.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True, eq=False)
class Factors:
    """The two Kronecker factors of one weight, for a layer that computes W a and gets the gradient g of that product.
    Both are symmetric, in float32 or in the weight's type if that is wider.

    ``a``: (d_in, d_in), Σ a aᵀ over the rows (samples, positions or tokens), not divided by anything; a bias is the
    last row and column. Layers with the same input share the tensor, so do not change it in place. ``g``: (d_out,
    d_out), Σ g gᵀ. With ``groups`` > 1 both have a leading dimension of that size, with one block for each group. A
    factor with more rows than ``Kronecker.diagonal_above`` is only its diagonal: a vector in place of a matrix.
    ``rows``: the number of rows summed in ``a``. (If parts of a weight have different inputs, it is the maximum over
    the parts, and the sums of the others are scaled to it.) ``samples``: the number of terms of the loss. ``bias``:
    whether the layer has a bias, so that the last input is always one. ``bias_name``: the name of that bias
    parameter; None without a bias. ``split``, ``order``: how the weight becomes a matrix; see `matrix`.
    """

    a: Tensor
    g: Tensor
    rows: int
    samples: int
    bias: bool
    bias_name: str | None
    groups: int
    split: tuple[int, ...]
    order: tuple[int, ...]

    def matrix(self, weight: Tensor, bias: Tensor | None = None) -> Tensor:
        """Return a weight, or its gradient, as the matrix (d_out, d_in) whose rows belong to ``g`` and whose columns
        to ``a``, with a leading dimension if there are several groups.

        Args:
            weight: the weight or its gradient.
            bias: the bias or its gradient, (groups · d_out,), which becomes the last column; required if
                ``self.bias`` is true; None otherwise.
        """
        found = weight.reshape(self.split).permute(self.order).reshape(self.groups, self.g.shape[-1], -1)
        if bias is not None:
            found = torch.cat([found, bias.reshape(self.groups, -1, 1)], -1)
        return found if self.groups > 1 else found[0]

    def tensors(self, matrix: Tensor, shape: torch.Size) -> tuple[Tensor, Tensor | None]:
        """Return the weight and the bias that `matrix` turns into ``matrix``.

        Args:
            matrix: (d_out, d_in), with a leading dimension if there are several groups.
            shape: the weight's shape.

        Returns:
            The weight; and the bias, (groups · d_out,), or None if the layer has none.
        """
        matrix = matrix.reshape(self.groups, self.g.shape[-1], -1)
        weight = matrix[..., :-1] if self.bias else matrix
        permuted = weight.reshape([self.split[dim] for dim in self.order])
        back = sorted(range(len(self.order)), key=self.order.__getitem__)
        bias = matrix[..., -1].reshape(-1) if self.bias else None
        return permuted.permute(back).reshape(shape), bias


@dataclass(frozen=True)
class Statistics:
    """The Kronecker factors of one training step, summed over its micro-batches.

    ``factors``: by the weight's name; empty if the step computes no statistics. A weight that is computed from
    parameters has the name of the parametrised attribute, or its parameters' names joined by ``+``; with an
    apostrophe if a parameter has that name. ``skipped``: by the parameter's name, the reason why it has no factors.
    Biases that are included in a weight's factors are in neither. ``step``: the number of the training step, from 0.
    The tensors are not counted in any later step's budget, so keep them only as long as needed.
    """

    factors: Mapping[str, Factors]
    skipped: Mapping[str, str]
    step: int
