"""Norms whose input and weight have different types: their fakes have the kernels' types, and steps under autocast have
eager mode's bits."""

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import rematplan
from rematplan.runtime.capture.patches.fake_layouts import TrueLayouts
from rematplan.runtime.graph.compat import pytree

ATEN = torch.ops.aten
IMAGES, TOKENS = torch.randn(4, 8, 6, 6), torch.randn(4, 5, 8)
ONES, ZEROS = torch.ones(8), torch.zeros(8)
STATS = (True, 0.1, 1e-5)


def batch_norm(x: Tensor, call: Callable[..., Any]) -> None:
    _, mean, deviation = call(ATEN.native_batch_norm.default, x, ONES, ZEROS, ZEROS, ONES, *STATS)
    call(
        ATEN.native_batch_norm_backward.default,
        *(x, x, ONES, ZEROS, ONES, mean, deviation, True, 1e-5, [True, True, True]),
    )
    call(ATEN._native_batch_norm_legit.default, x, ONES, ZEROS, ZEROS, ONES, *STATS)
    call(ATEN._batch_norm_with_update.default, x, ONES, ZEROS, ZEROS, ONES, 0.1, 1e-5)


def layer_norm(x: Tensor, call: Callable[..., Any]) -> None:
    _, mean, deviation = call(ATEN.native_layer_norm.default, x, [8], ONES, ZEROS, 1e-5)
    call(ATEN.native_layer_norm_backward.default, x, x, [8], mean, deviation, ONES, ZEROS, [True, True, True])


def group_norm(x: Tensor, call: Callable[..., Any]) -> None:
    _, mean, deviation = call(ATEN.native_group_norm.default, x, ONES, ZEROS, 4, 8, 36, 2, 1e-5)
    call(
        ATEN.native_group_norm_backward.default, x, x, mean, deviation, ONES, 4, 8, 36, 2, [True, True, True]
    )


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
@pytest.mark.parametrize(
    ("norm", "x"),
    [
        (batch_norm, IMAGES),
        (layer_norm, TOKENS),
        (layer_norm, TOKENS.mT.contiguous().mT),
        (group_norm, IMAGES),
    ],
)
def test_fakes_have_the_types_and_strides_of_results(
    norm: Callable[..., None], x: Tensor, dtype: torch.dtype
) -> None:
    def both(op: Any, *args: Any) -> Any:
        real = op(*(a.clone() if isinstance(a, Tensor) else a for a in args))
        with TrueLayouts() as mode:
            fakes = op(*(mode.from_tensor(a) if isinstance(a, Tensor) else a for a in args))
        for r, fake in zip(pytree.tree_leaves(real), pytree.tree_leaves(fakes), strict=True):
            if r.numel():
                assert (fake.dtype, fake.shape, fake.stride()) == (r.dtype, r.shape, r.stride())
        return real

    norm(x.to(dtype), both)


class Mixing(nn.Module):
    """Norms of all kinds, one of a transposed input."""

    def __init__(self) -> None:
        super().__init__()
        self.conv, self.images = nn.Conv2d(3, 8, 3, padding=1), nn.BatchNorm2d(8)
        self.groups, self.tokens = nn.GroupNorm(2, 8), nn.LayerNorm(8)
        self.mix, self.head = nn.Linear(36, 36), nn.Linear(8, 4)

    def forward(self, x: Tensor) -> Tensor:
        x = self.groups(self.images(self.conv(x))).flatten(2)
        return self.head(self.tokens(self.mix(x).transpose(1, 2)).mean(1))


def test_a_step_under_autocast_has_the_bits_of_eager_mode() -> None:
    torch.manual_seed(0)
    model, x = Mixing(), torch.randn(4, 3, 6, 6)
    plain = copy.deepcopy(model)
    with torch.autocast("cpu", torch.bfloat16):
        planned = rematplan.plan_module(
            model, (x,), budget="90%", costs="roofline", strategy="approx_dp", on_infeasible="least"
        )
        outputs = [m(x) for m in (planned, plain)]
    for out in outputs:
        out.float().square().mean().backward()
    assert torch.equal(*outputs)
    for p, q in zip(planned.parameters(), plain.parameters(), strict=True):
        assert torch.equal(p.grad, q.grad)
