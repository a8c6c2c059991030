"""Ops that tracing alone would decompose are captured whole, and so run as in eager mode, bit by bit."""

import copy

import pytest
import torch
import torch.nn.functional as F
from planned_steps import PlannedStep, problem, run_once, verify
from torch import nn

from rematplan.planner.strategies.store_all import no_recompute
from rematplan.runtime.capture.capture import capture
from rematplan.runtime.capture.patches.eager_kernels import PREFIXES, native_kernels
from rematplan.runtime.capture.with_loss import with_loss
from rematplan.runtime.costs.device_models import device_model
from rematplan.runtime.costs.roofline import roofline_costs
from rematplan.runtime.execute.compile import named_tensors
from rematplan.runtime.graph.captured_step import refs
from rematplan.runtime.inversion.find_inverses import with_inverses

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
    "margins": lambda x: F.multi_margin_loss(x[0, 0], torch.arange(8), weight=x[0, 1, 0].detach().abs()),
    "margins of many": lambda x: F.multilabel_margin_loss(
        x[0, 0], torch.arange(64).view(8, 8) % 5, reduction="none"
    ),
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
    plan = no_recompute(problem(step, roofline_costs(step, device_model("laptop-cpu"))))
    assert verify(PlannedStep(module, step, plan.schedule), batch).bit_equal


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16])
@pytest.mark.parametrize("rate", [0.0, 0.1, 0.15, 0.45, 0.5, 0.99, 1.0])
def test_dropout_has_the_bits_of_eager_mode_at_any_rate(rate, dtype):
    torch.manual_seed(0)
    call = Call(lambda x: F.dropout(x, rate)).to(dtype)
    module, batch = with_loss(call, (torch.randn(2, 3, 32, 32).to(dtype),), "mse")
    step = capture(module, batch, "dropout")
    plan = no_recompute(problem(step, roofline_costs(step, device_model("laptop-cpu"))))
    assert verify(PlannedStep(module, step, plan.schedule), batch).bit_equal


class Norm(nn.Module):
    """What `batch_norm` calls on a CUDA device."""

    def __init__(self, training, stats=True):
        super().__init__()
        self.training_, self.norm = training, nn.BatchNorm2d(3, track_running_stats=stats)

    def forward(self, x):
        n = self.norm
        return torch.cudnn_batch_norm(
            x, n.weight, n.bias, n.running_mean, n.running_var, self.training_, 0.1, n.eps
        )[0]


def test_cudnns_batch_norm_gives_its_running_statistics():
    torch.manual_seed(0)
    module, batch = with_loss(Norm(True), (torch.randn(2, 3, 8, 8),), "mse")
    step = capture(module, batch, "norm")
    targets = [c.target for c in step.calls]
    assert torch.ops.aten._batch_norm_with_update_functional.default in targets
    assert torch.ops.aten.batch_norm_backward.default in targets
    assert [o.target for o in step.outputs if o.kind == "buffer"] == [
        "model.norm.running_mean",
        "model.norm.running_var",
    ]
    plan = no_recompute(problem(step, roofline_costs(step, device_model("laptop-cpu"))))
    planned, plain = PlannedStep(module, step, plan.schedule), copy.deepcopy(module)
    plain.model = plain.model.norm  # on a CPU both run the same kernel
    loss = plain(*batch)
    loss.backward()
    assert torch.equal(run_once(planned, batch), loss)
    pairs = zip(module.model.norm.parameters(), plain.model.parameters(), strict=True)
    assert all(torch.equal(p.grad, q.grad) for p, q in pairs)
    assert torch.equal(module.model.norm.running_var, plain.model.running_var)


@pytest.mark.parametrize(("training", "stats"), [(False, True), (True, False)])
def test_cudnns_batch_norm_stays_where_it_changes_nothing(training, stats):
    module, batch = with_loss(Norm(training, stats), (torch.randn(2, 3, 8, 8),), "mse")
    step = capture(module, batch, "norm")
    assert torch.ops.aten.cudnn_batch_norm.default in [c.target for c in step.calls]
    assert not any(o.kind == "buffer" for o in step.outputs)


def test_cudnns_frozen_batch_norm_is_inverted_by_the_running_statistics():
    def inverse(norm):
        torch.manual_seed(0)
        module = Call(lambda x: norm(x.sin()).sin().sum())
        module.norm = norm
        step = with_inverses(capture(module, (torch.randn(2, 3, 8, 8),), "norm"), named_tensors(module)).step
        (call,) = step.inverses
        buffers = {i.value: i.target.split(".")[-1] for i in step.inputs if i.kind == "buffer"}
        return str(call.target), [buffers[r.value] for r in refs(call.args) if r.value in buffers]

    assert inverse(Norm(False)) == inverse(nn.BatchNorm2d(3).eval())
    assert inverse(Norm(False))[1] == ["running_mean", "running_var"]


def test_the_decompositions_are_put_back():
    def kernels():
        aten = torch.ops.aten
        ops = [
            aten.upsample_bilinear2d.vec,
            aten.softshrink.default,
            aten.dropout.default,
            aten.cudnn_batch_norm.default,
        ]
        return [dict(op.py_kernels) for op in ops]

    before = kernels()
    with native_kernels():
        assert kernels() != before
    assert kernels() == before
