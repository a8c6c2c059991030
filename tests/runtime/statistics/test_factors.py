"""What the factors say of a weight: a matrix, and back."""

import pytest
import torch

from rematplan.runtime.statistics.factors import Factors


@pytest.mark.parametrize(
    ("shape", "groups", "split", "order", "d_out"),
    [
        ((3, 5), 1, (3, 5), (0, 1), 3),
        ((5, 3), 1, (5, 3), (1, 0), 3),
        ((6, 2, 3, 3), 2, (2, 3, 2, 3, 3), (0, 1, 2, 3, 4), 3),
        ((4, 3, 2, 2), 2, (2, 2, 3, 2, 2), (0, 2, 1, 3, 4), 3),
    ],
)
@pytest.mark.parametrize("bias", [False, True])
def test_a_weight_becomes_a_matrix_and_back(shape, groups, split, order, d_out, bias):
    weight, offset = torch.randn(shape), torch.randn(groups * d_out)
    g = torch.zeros(groups, d_out, d_out)
    name = "bias" if bias else None
    factors = Factors(g, g, 1, 1, bias, name, groups, split, order)
    matrix = factors.matrix(weight, offset if bias else None)
    assert matrix.shape[-2:] == (d_out, weight.numel() // (groups * d_out) + bias)
    again, again_bias = factors.tensors(matrix, weight.shape)
    assert torch.equal(again, weight)
    assert torch.equal(again_bias, offset) if bias else again_bias is None
