"""The statistics of a training step: the two Kronecker factors of each weight, by the weight's name.

A layer is s = W a, where a ends with a one if the layer has a bias. The gradient of its weight is a sum over rows r
(samples, positions of a convolution's output, tokens, and every use of a shared weight): ∂loss/∂W = Σ g_r a_rᵀ. The two
factors are A = Σ a_r a_rᵀ (`Factors.a`) and G = Σ g_r g_rᵀ (`Factors.g`), and

    F ≈ (G / samples) ⊗ (A / rows)

approximates the Fisher matrix of the mean loss (Martens and Grosse 2015; shared weights: Eschenhagen et al. 2023).

Scale. A loss is the mean or the sum of ``samples`` terms, one for each sample (or token, or pixel: whatever cross
entropy averages over). The rows g_r are gradients of the *sum* of the terms, whatever the reduction of the user's loss.
Therefore A, G, ``rows`` and ``samples`` of micro-batches, of steps and of ranks can be added. For the Fisher kinds
``mc`` and ``type-2`` this is so by construction. For ``empirical`` the rows come from the backward of the user's loss,
and are multiplied by ``samples`` if that loss is a mean (``loss_reduction="mean"``). Any other factor of the loss (the
scale of a GradScaler, 1/k for k micro-batches) appears squared in G; the user divides G by its square.

Options. With ``approx="expand"`` a row is one row of the layer's matrix product. With ``approx="reduce"`` a row is one
sample of the batch: a_r is the mean of the sample's inputs over its positions or tokens, g_r the sum of its gradients.
With a ``share`` below one, A and ``rows`` count only the selected rows. G is multiplied by the number of all rows
divided by that of the selected rows.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True, eq=False)
class Factors:
    """The two Kronecker factors of one weight W, for a layer that computes W x from an input x. The gradient of the
    loss with respect to W x is y. Both factors are symmetric, in float32, or in the type of x (of y) if that is wider.

    ``a``: (d_in, d_in), the sum Σ x xᵀ over the rows (samples, positions or tokens), not divided by anything. If the
    layer has a bias, x ends with a one, so the last row and column belong to the bias. Layers with the same input share
    this tensor, so do not change it in place. ``g``: (d_out, d_out), the sum Σ y yᵀ. With ``groups`` > 1 both have a
    leading dimension of that size, with one matrix for each group. A factor with more rows than
    ``Kronecker.diagonal_above`` is only its diagonal: a vector instead of a matrix.

    ``rows``: the number of rows summed in ``a``. (If blocks of a weight's rows have different inputs, it is the maximum
    over the blocks, and the sums of the other blocks are scaled to it.) ``samples``: the number of terms of the loss
    (for cross entropy one for each sample or token) in all micro-batches that are summed. ``bias``: whether the layer
    has a bias. ``bias_name``: the name of that bias parameter; None without a bias. ``groups``, ``split``, ``order``:
    how the weight becomes a matrix; see `matrix`. ``of_loss``: whether the gradients y come from the backward of the
    user's loss (``fisher="empirical"``). A factor of that loss then appears squared in ``g``.
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
    of_loss: bool = True

    def matrix(self, weight: Tensor, bias: Tensor | None = None) -> Tensor:
        """Return a weight, or its gradient, as a matrix (d_out, d_in), or (groups, d_out, d_in) if there are several
        groups. Its rows correspond to those of ``g`` and its columns to those of ``a``.

        Args:
            weight: the weight or its gradient.
            bias: the bias or its gradient, (groups · d_out,), which becomes the last column. Pass it if ``self.bias``
                is true, and None otherwise.
        """
        found = weight.reshape(self.split).permute(self.order).reshape(self.groups, self.g.shape[-1], -1)
        if bias is not None:
            found = torch.cat([found, bias.reshape(self.groups, -1, 1)], -1)
        return found if self.groups > 1 else found[0]

    def tensors(self, matrix: Tensor, shape: torch.Size) -> tuple[Tensor, Tensor | None]:
        """Return a weight and a bias from their common matrix. This is the inverse of `matrix`.

        Args:
            matrix: (d_out, d_in), or (groups, d_out, d_in) if there are several groups.
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

    ``factors``: by the weight's name; empty if the step computes no statistics. A weight may be computed from
    parameters, for example by a parametrisation. Its name is then that of the parametrised attribute, or its
    parameters' names joined by ``+``; an apostrophe is appended if that name exists already. ``skipped``: by the
    parameter's name, the reason why the parameter has no factors. A bias that is included in the factors of a weight
    appears in neither mapping. ``step``: the number of the training step, from 0. No later step's budget counts the
    tensors of the factors, so keep them only as long as needed.
    """

    factors: Mapping[str, Factors]
    skipped: Mapping[str, str]
    step: int
