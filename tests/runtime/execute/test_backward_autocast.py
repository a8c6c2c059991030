"""A backward inside of autocast: eager mode casts its ops, too, so it runs only where that changes nothing."""

import copy

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional

import rematplan
from rematplan.ir import ModelError


class Attention(nn.Module):
    """With dropout, the backward of attention on a CPU multiplies matrices of float32."""

    def __init__(self, dropout: float) -> None:
        super().__init__()
        self.qkv, self.out, self.dropout = nn.Linear(16, 48), nn.Linear(16, 16), dropout

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = (t.unflatten(-1, (2, 8)).transpose(1, 2) for t in self.qkv(x).chunk(3, -1))
        mixed = functional.scaled_dot_product_attention(q, k, v, dropout_p=self.dropout)
        return x + self.out(mixed.transpose(1, 2).flatten(2))


def gradients(model: nn.Module, x: Tensor, *, inside: bool) -> list[Tensor]:
    model.zero_grad()
    torch.manual_seed(0)
    with torch.autocast("cpu", torch.bfloat16):
        loss = model(x).float().square().mean()
        if inside:
            loss.backward()
    if not inside:
        loss.backward()
    return [p.grad for p in model.parameters()]


def test_a_backward_that_autocast_changes_is_refused_and_others_are_equal() -> None:
    torch.manual_seed(0)
    x = torch.randn(2, 12, 16)
    for dropout in (0.0, 0.1):
        plain = Attention(dropout)
        options = {"budget": "100%", "costs": "roofline", "refine": False}
        planned = rematplan.apply(copy.deepcopy(plain), **options)
        for inside in (False, True):
            expected = gradients(plain, x, inside=inside)
            if inside and dropout:
                with pytest.raises(
                    ModelError, match=r"inside of torch.autocast, which would change aten.bmm"
                ):
                    gradients(planned, x, inside=True)
            else:
                assert all(map(torch.equal, gradients(planned, x, inside=inside), expected))
