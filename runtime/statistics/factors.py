"""What a step with statistics gives: the Kronecker factors of its weights, by parameter name.

A layer is s = W a, with a last input of one where it has a bias. The gradient of its weight is a sum over rows r
(samples, positions of a convolution's output, tokens, and each use of a weight that is used several times):
∂loss/∂W = Σ g_r a_rᵀ. The factors are a = Σ a_r a_rᵀ and g = Σ g_r g_rᵀ, and

    F ≈ (g / samples) ⊗ (a / rows)

approximates the Fisher matrix of the mean loss (Martens and Grosse 2015; shared weights: Eschenhagen et al. 2023).

Scale. A loss is a mean or a sum of terms, one for each sample (or token, or pixel: what cross entropy takes the mean
of); ``samples`` is their number. The rows g_r are gradients of the *sum* of the terms, whatever the reduction of the
user's loss, so that ``g`` and ``a`` of micro-batches, of steps and of ranks add up, and so do ``rows`` and ``samples``.
With the Fisher kinds ``mc`` and ``type-2`` this holds by construction. With ``empirical`` the rows are read from the
backward of the user's own loss: they are multiplied by ``samples`` where that is a mean (``loss_reduction="mean"``).
Any other factor of the loss (the scale of a GradScaler, 1/k of k micro-batches) stands squared in ``g``, and who
applied it divides ``g`` by its square.

With ``approx="expand"`` a row is one row of the layer's matrix product. With ``reduce`` a row is one sample of the
batch: a_r is the mean of its inputs over places or tokens, g_r the sum of its gradients. With a ``share`` of the rows
below one, ``a`` and ``rows`` count the rows that were taken, and ``g`` is multiplied by all rows ÷ taken rows.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True, eq=False)
class Factors:
    """The two factors of one weight. Both are symmetric, in float32 or in the weight's type if that is wider.

    ``a``: (d_in, d_in), where a bias is the last row and column; Σ a aᵀ, not divided. Layers with the same input hold
    the same tensor: change it only in a copy. ``g``: (d_out, d_out), Σ g gᵀ. With ``groups`` > 1 both have a leading
    dimension of that size, one block a group. A factor with more rows than ``diagonal_above`` says is its diagonal, a
    vector in place of a matrix. ``rows``: the number of rows that ``a`` sums (where parts of a weight have inputs of
    their own, the most of them; the sums of the others are scaled to that).
    ``samples``: the number of terms of the loss. ``bias``: whether the last input is one, for the bias called
    ``bias_name``. ``split``, ``order``: how the weight becomes a matrix, see `matrix`.
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
        """The weight, or its gradient, as the matrix between the factors: (d_out, d_in), with a leading dimension of
        groups if there are several.

        ``bias``: of shape (groups · d_out,), the last column; needed if `bias` is true.
        """
        found = weight.reshape(self.split).permute(self.order).reshape(self.groups, self.g.shape[-1], -1)
        if bias is not None:
            found = torch.cat([found, bias.reshape(self.groups, -1, 1)], -1)
        return found if self.groups > 1 else found[0]

    def tensors(self, matrix: Tensor, shape: torch.Size) -> tuple[Tensor, Tensor | None]:
        """The inverse of `matrix`: the weight of a ``shape``, and the bias (d_out,) if there is one."""
        matrix = matrix.reshape(self.groups, self.g.shape[-1], -1)
        weight = matrix[..., :-1] if self.bias else matrix
        permuted = weight.reshape([self.split[dim] for dim in self.order])
        back = sorted(range(len(self.order)), key=self.order.__getitem__)
        bias = matrix[..., -1].reshape(-1) if self.bias else None
        return permuted.permute(back).reshape(shape), bias


@dataclass(frozen=True)
class Statistics:
    """The statistics of one training step, summed over its micro-batches.

    ``factors``: by the weight's name. ``skipped``: by the parameter's name, why it has no factors; biases that stand
    within a weight's factors are in neither. ``step``: the number of the training step that they belong to, from 0. A
    step that takes none has no factors. Whoever keeps this beyond its step holds bytes that no plan counts.
    """

    factors: Mapping[str, Factors]
    skipped: Mapping[str, str]
    step: int
