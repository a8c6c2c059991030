"""Ops that tracing alone would decompose are captured whole, and so run as in eager mode, bit by bit."""

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from rematplan import api
from rematplan.runtime.capture import capture
from rematplan.runtime.loss import with_loss
from rematplan.runtime.native_kernels import PREFIXES, native_kernels
from rematplan.runtime.training_step import PlannedStep, verify

CALLS = {
    "bilinear": lambda x: F.interpolate(x, scale_factor=2, mode="bilinear"),
    "corners": lambda x: F.interpolate(x, size=(13, 11), mode="bilinear", align_corners=True),
    "nearest": lambda x: F.interpolate(x, scale_factor=2.0),
    "exact": lambda x: F.interpolate(x, size=(5, 5), mode="nearest-exact"),
    "bicubic": lambda x: F.interpolate(x, scale_factor=2.0, mode="bicubic"),
    "volume": lambda x: F.interpolate(x[None], scale_factor=2.0, mode="trilinear"),
    "antialias": lambda x: F.interpolate(x, size=(5, 5), mode="bilinear", antialias=True),
    "hardshrink": F.hardshrink,
    "softshrink": F.softshrink,
}


class Call(nn.Module):
    def __init__(self, call):
        super().__init__()
        self.call, self.w = call, nn.Parameter(torch.randn(3, 1, 1))

    def forward(self, x):
        return self.call(x * self.w)


@pytest.mark.parametrize("name", CALLS)
def test_captured_whole_and_bit_equal(name):
    torch.manual_seed(0)
    module, batch = with_loss(Call(CALLS[name]), (torch.randn(2, 3, 8, 8),), "mse")
    step = capture(module, batch, name)
    targets = [str(c.target).removeprefix("aten.") for c in step.calls]
    assert sum(t.startswith(PREFIXES) for t in targets) == 2  # forward and backward
    plan = api.no_recompute(api.problem(api.LoadedStep(module, batch, step)))
    assert verify(PlannedStep(module, step, plan.schedule), batch).bit_equal


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16])
@pytest.mark.parametrize("rate", [0.0, 0.1, 0.15, 0.45, 0.5, 0.99, 1.0])
def test_dropout_has_the_bits_of_eager_mode_at_any_rate(rate, dtype):
    torch.manual_seed(0)
    call = Call(lambda x: F.dropout(x, rate)).to(dtype)
    module, batch = with_loss(call, (torch.randn(2, 3, 32, 32).to(dtype),), "mse")
    step = capture(module, batch, "dropout")
    plan = api.no_recompute(api.problem(api.LoadedStep(module, batch, step)))
    assert verify(PlannedStep(module, step, plan.schedule), batch).bit_equal


def test_the_decompositions_are_put_back():
    def kernels():
        aten = torch.ops.aten
        ops = [aten.upsample_bilinear2d.vec, aten.softshrink.default, aten.dropout.default]
        return [dict(op.py_kernels) for op in ops]

    before = kernels()
    with native_kernels():
        assert kernels() != before
    assert kernels() == before
